"""Make room for nodes that have returned: keep the state, and end the ranks of this attempt.

Horovod informs its ranks of new nodes, and they continue in the same processes. Here the launcher
asks the ranks by a signal; it restarts all of them, on all nodes, from the commit.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .....launch.monitor.rank_messages import MAKE_ROOM_SIGNAL
from .....record.ring.launcher_messages import send_to_launcher
from .....world.early_exit import EarlyExit
from ...common.elastic import notification_manager
from ...core.errors import HostsUpdatedInterrupt
from ..functions import broadcast_object
from .commits import CommitStore
from .state import TorchState


class ReturnedNodes:
    """Whether the launcher has asked this rank to make room.

    Args:
        commits: Where the state is kept.
    """

    def __init__(self, commits: CommitStore) -> None:
        self._commits, self._is_asked = commits, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Tell the launcher that this rank can make room, while the body of ``with`` runs."""
        listens = threading.current_thread() is threading.main_thread() and signal.getsignal(
            MAKE_ROOM_SIGNAL
        ) in (signal.SIG_DFL, signal.SIG_IGN)
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
