"""The cores and memory of this host that this process may use, and its file systems."""

import contextlib
import os
from pathlib import Path

from ...plurals import parse_ranges
from ...record.ring.memory_sampler import available_memory, memory_limits

IN_MEMORY = ("tmpfs", "ramfs")  # types of file systems


def allowed_threads() -> list[int]:
    """Return the numbers of the hardware threads that this process may run on, sorted."""
    return sorted(os.sched_getaffinity(0))


def numa_domain_count() -> int:
    """Return the number of NUMA domains with a core that this process may run on; at least 1."""
    allowed, count = set(allowed_threads()), 0
    for node in Path("/sys/devices/system/node").glob("node[0-9]*"):
        try:
            count += bool(allowed & set(parse_ranges((node / "cpulist").read_text().strip())))
        except (OSError, ValueError):
            continue
    return max(1, count)


def free_memory() -> int:
    """Return the bytes that new processes may allocate.

    This is the kernel's available memory, or less if a control group of this process has less.
    """
    return min([available_memory(), *(limit - used for limit, used in memory_limits())])


def file_system_type(path: Path) -> str:
    """Return the type of the file system of a path as the kernel lists it; "" if unknown."""
    from ...security.overlay import is_inside, mounts  # not needed to start a job

    real, nearest, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError):
        for mount, _, description in mounts():
            # the last of several mounts covers the others
            if is_inside(real, (mount,)) and len(mount) >= len(nearest):
                nearest, kind = mount, description.split(" ")[0]
    return kind
