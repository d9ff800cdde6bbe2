"""The loop of an elastic training, with ranks that ``paceline run`` restarts."""

import functools
from collections.abc import Callable
from typing import Any

from ...common.elastic import State, run_fn
from ..mpi_ops import init, shutdown, size
from .commits import CommitStore
from .state import TorchState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a training function continue after a rank was lost.

    Under ``paceline run --max-restarts N`` the launcher restarts all ranks when one is lost. They
    run the script from its beginning; ``func`` is called with the state of the last commit, after
    its reset callbacks.

    Args:
        func: Training function, whose first argument is the state.
    """
    loop = run_fn(func, _reset, _may_continue)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        commits = CommitStore.of_job()
        if commits is not None and isinstance(state, TorchState) and state.resume(commits):
            state.on_reset()
        return loop(state, *args, **kwargs)

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
