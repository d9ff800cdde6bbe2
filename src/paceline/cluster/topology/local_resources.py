"""The cores and memory of this host that this process may use, and its file systems."""

import os
import re
from pathlib import Path

from ...record.ring.memory_sampler import available_memory, memory_limits

MOUNTS = Path("/proc/self/mountinfo")
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


def parse_ranges(text: str) -> list[int]:
    """Parse ranges as the kernel writes lists of cores: "0-2,5" as [0, 1, 2, 5]."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def file_system_type(path: Path) -> str:
    """Return the type of the file system of a path as the kernel lists it; "" if unknown."""
    real, nearest, kind = os.path.realpath(path), "", ""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # The kernel writes a space in a path as \040.
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(nearest):  # the last of several mounts covers the others
            nearest, kind = mount, after.split(" ")[0]
    return kind
