"""The kernel's ids of threads, also in a forked process."""

import os
import threading


def native_thread_id(ident: int) -> int | None:
    """Return the kernel's id (Linux: TID) of a thread of this process.

    ``threading.Thread.native_id`` of the main thread is that of the parent process after a fork
    (Python 3.11 and 3.12). The main thread's TID is the PID.

    Args:
        ident: ``threading.get_ident()`` of the thread.

    Returns:
        None if Python does not know the thread, or it has not begun.
    """
    if ident == threading.main_thread().ident:
        return os.getpid()
    return next((one.native_id for one in threading.enumerate() if one.ident == ident), None)
