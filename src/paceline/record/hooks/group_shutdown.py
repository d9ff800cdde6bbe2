"""Destroy a process group without a deadlock.

gloo's destructor joins its threads while it holds the interpreter lock (GIL), and such a thread may
need that lock to free the last reduced tensor (compare pytorch issue 56297). Therefore all
references are dropped and the threads become idle before the group is destroyed.
"""

import functools
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...security.processes import stat_fields
from .taps import around

POLL_INTERVAL_S = (
    0.02  # the sleep releases the interpreter lock, so that waiting threads can take it
)
MAX_WAIT_S = 1.0


def wait_for_idle_threads() -> None:
    """Wait until no other thread of this process runs, at most ``MAX_WAIT_S`` seconds."""
    gc.collect()
    deadline = time.monotonic() + MAX_WAIT_S
    time.sleep(POLL_INTERVAL_S)
    while time.monotonic() < deadline and _other_threads_run():
        time.sleep(POLL_INTERVAL_S)


def _other_threads_run() -> bool:
    others = {task.name for task in Path("/proc/self/task").glob("*")}
    others.discard(str(threading.get_native_id()))
    return any(stat_fields(f"self/task/{task}")[:1] == ["R"] for task in others)


@functools.cache  # once for a module
def patch_destroy_process_group(c10d: Any) -> None:
    """Make ``destroy_process_group`` of torch.distributed wait for the threads."""

    def destroy(function: Callable[[Any], None], group: Any = None) -> None:
        for member in [group] if group is not None else list(c10d._world.pg_map):
            if hasattr(member, "settle"):
                member.settle(seconds=1.0)
        wait_for_idle_threads()
        function(group)

    around(c10d, "destroy_process_group", destroy)
