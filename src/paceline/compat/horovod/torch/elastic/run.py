"""The loop of an elastic training, with ranks that ``paceline run`` restarts."""

import contextlib
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .....launch.monitor.rank_messages import MAKE_ROOM_SIGNAL
from .....record.ring.launcher_messages import send_to_launcher
from .....world.early_exit import EarlyExit
from ...common.elastic import State, notification_manager, run_fn
from ...core.errors import HostsUpdatedInterrupt
from ..functions import broadcast_object
from ..mpi_ops import init, shutdown, size
from .commits import CommitStore
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


class ReturnedNodes:
    """Whether the launcher has asked this rank to make room for nodes that have returned.

    Horovod informs its ranks of new nodes, and they continue in the same processes. Here the
    launcher asks the ranks by a signal, and they keep their state and end; it restarts all of them,
    on all nodes, from the commit.

    Args:
        commits: Where the state is kept.
    """

    def __init__(self, commits: CommitStore) -> None:
        self._commits, self._is_asked = commits, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Tell the launcher that this rank can make room, while the body of ``with`` runs."""
        is_unused = signal.getsignal(MAKE_ROOM_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
        listens = is_unused and threading.current_thread() is threading.main_thread()
        if listens:
            signal.signal(MAKE_ROOM_SIGNAL, self._on_signal)
            signal.siginterrupt(MAKE_ROOM_SIGNAL, False)  # it may interrupt a thread of gloo
            send_to_launcher(makes_room=True)
        try:
            yield
        finally:
            if listens:
                send_to_launcher(makes_room=False)
                signal.signal(MAKE_ROOM_SIGNAL, signal.SIG_IGN)  # it may be on its way

    def _on_signal(self, *_: Any) -> None:
        self._is_asked = True
        notification_manager.handle_hosts_updated(time.time())

    def leaving(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``func``; when it stops for returned nodes, keep its state and end this rank."""

        def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
            try:
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                # Raised on all ranks; the signal may not yet have reached each of them.
                if not broadcast_object(self._is_asked, name="elastic.leave"):
                    raise
            state.save()
            state.keep()
            send_to_launcher(left=self._commits.number)
            raise EarlyExit

        return wrapper
