"""A lock that a forked child can take, although a thread of the parent held it.

Threads do not survive a fork: a lock that one of them holds would never be released in the child.
"""

import os
import threading
import weakref


class ForkSafeLock:
    """A lock for ``with`` that is free in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replace the lock by a free one."""
        self._lock = threading.Lock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)
