"""The names of ``horovod.common.elastic``: states that are committed, and their training loop."""

import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any

from ..core.errors import HorovodInternalError, HostsUpdatedInterrupt


class NotificationManager:
    """The states that are informed when nodes of the job return."""

    def __init__(self) -> None:
        self._listeners: set[State] = set()

    def init(self) -> None:
        """Do nothing: Horovod starts a server here."""

    def register_listener(self, listener: "State") -> None:
        self._listeners.add(listener)

    def remove_listener(self, listener: "State") -> None:
        self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Inform all states."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()


class State:
    """State of a training that continues after a rank was lost.

    Subclasses define ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: Function that returns rank 0's object on all ranks.
        get_rank: Function that returns this rank.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **_: Any
    ) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have functions called after the ranks of the job have changed, for instance to scale the
        learning rate with their number.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Forget messages about nodes, and call the reset callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = 0) -> None:
        """Take note that nodes have changed; ``check_host_updates`` acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, so that the training continues from here if a rank is lost.

        Raises:
            HostsUpdatedInterrupt: Nodes have returned. ``elastic.run`` handles it.
        """
        self.save()
        self.keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether nodes have returned. Collective.

        Raises:
            HostsUpdatedInterrupt: On all ranks, if rank 0 knows of it.
        """
        newest = previous = self._last_updated_timestamp
        while not self._host_messages.empty():
            newest = max(newest, self._host_messages.get()[0])
        self._last_updated_timestamp = self._bcast_object(newest)
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(False)

    def save(self) -> None:
        """Save the state in the memory of this process."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed number of ranks, before the reset callbacks."""

    def keep(self) -> None:
        """Keep the saved state where it outlives this process."""


class ObjectState(State):
    """State of Python objects, which are attributes of this object.

    Args:
        bcast_object: Function that returns rank 0's object on all ranks.
        get_rank: Function that returns this rank.
        kwargs: The attributes with their first values.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(
    func: Callable[..., Any],
    reset: Callable[[], Any],
    may_continue: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """Return ``func`` with the loop of an elastic training around it.

    The state is synchronized before each call. After HorovodInternalError the last commit is
    restored; after HostsUpdatedInterrupt the state remains. Then ``reset`` is called, the state's
    reset callbacks, and ``func`` again. Where ``may_continue`` returns False after
    HorovodInternalError, the error is raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    if not may_continue():
                        raise
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as update:
                    skip_sync = update.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper
