"""The loop of an elastic training, with ranks that ``paceline run`` restarts."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

from ...common.elastic import State, run_fn
from ..mpi_ops import init, shutdown, size
from .commits import CommitStore
from .returned_nodes import ReturnedNodes
from .state import TorchState

_runs = itertools.count()  # trainings of this process; a script has the same in each attempt


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a training function continue after a rank was lost.

    Under ``paceline run --max-restarts N`` the launcher restarts all ranks when one is lost. They
    run the script from its beginning; ``func`` is called with the state of the last commit, after
    its reset callbacks.

    Args:
        func: Training function, whose first argument is the state.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        commits = CommitStore.of_job(next(_runs))
        if commits is None or not isinstance(state, TorchState):
            return run_fn(func, _reset, _may_continue)(state, *args, **kwargs)
        if state.resume(commits):
            state.on_reset()
        nodes = ReturnedNodes(commits)
        with nodes.listening():
            return run_fn(nodes.leaving(func), _reset, _may_continue)(state, *args, **kwargs)

    return wrapper


def _reset() -> None:
    shutdown()
    init()


def _may_continue() -> bool:
    """Return whether this rank can continue after a collective has failed.

    With several ranks it can't: the others may wait in a collective, or have ended. The launcher
    restarts all of them.
    """
    return size() == 1
