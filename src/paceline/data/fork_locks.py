"""Locks that a forked child can take, although a thread of the parent held them.

Threads do not survive a fork. A lock that one of them holds would never be released in the child.
"""

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def make_lock() -> threading.Lock:
    """Return a lock that is free in a forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading itself does


os.register_at_fork(after_in_child=_free_locks)
