"""Leaving a process group without a hang.

gloo's destructor joins its threads while it holds the interpreter's lock, and such a thread may
want that lock to free the last reduced tensor (compare pytorch issue 56297). So: drop what is
held, let those threads come to rest, and only then destroy the group.
"""

import functools
import gc
import threading
import time
from pathlib import Path
from typing import Any

POLL_INTERVAL_S = 0.02  # seconds; releases the lock: a thread that wants it gets it now
MAX_WAIT_S = 1.0


def wait_for_idle_threads() -> None:
    """Wait until no other thread of this process runs, for PATIENCE seconds at most."""
    gc.collect()
    deadline = time.monotonic() + MAX_WAIT_S
    time.sleep(POLL_INTERVAL_S)
    while time.monotonic() < deadline and _others_run():
        time.sleep(POLL_INTERVAL_S)


def _others_run() -> bool:
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended
        if task.name != own and state == "R":
            return True
    return False


def patch_destroy_process_group(c10d: Any) -> None:
    """Make torch.distributed's destroy_process_group careful; once."""
    import torch.distributed as dist

    original = c10d.destroy_process_group
    if original.__module__ == __name__:
        return

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        for one in [group] if group is not None else list(c10d._world.pg_map):
            if hasattr(one, "settle"):
                one.settle(seconds=1.0)
        wait_for_idle_threads()
        original(group)

    destroy_process_group.__module__ = __name__
    c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group
