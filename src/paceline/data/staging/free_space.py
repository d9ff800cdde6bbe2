"""Bytes that may be written to a folder: free disk space, or memory that the job may still use."""

import os
from pathlib import Path

MOUNTS = Path("/proc/mounts")
KEPT = 0.1  # share of the free space that stays free
IN_MEMORY = ("tmpfs", "ramfs")
UNLIMITED = 1 << 60  # bytes; a control group without a limit reports this or more


def free(folder: Path) -> int:
    """Return the number of bytes that may be written to a folder.

    Files in /dev/shm count as memory of the job, and a scheduler ends a job that uses more memory
    than it requested.
    """
    told = os.statvfs(folder)
    found = told.f_bavail * told.f_frsize
    if kind_of(folder) in IN_MEMORY:
        found = min([found, *_memory()])
    return max(int((1 - KEPT) * found), 0)


def kind_of(folder: Path) -> str:
    """Return the type of the file system that a folder is on."""
    best, kind = "", ""
    path = str(folder.resolve())
    for line in MOUNTS.read_text().splitlines():
        _, mount, name, *_ = line.split()
        mount = mount.replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def _memory() -> list[int]:
    """Return the bytes left on the node, and in each control group of this process."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            found += _groups(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
        elif "memory" in names.split(","):
            two = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _groups(Path("/sys/fs/cgroup/memory"), path, *two)
    return found


def _groups(top: Path, path: str, limit: str, usage: str) -> list[int]:
    found = []
    group = top / path.lstrip("/")
    for one in (group, *group.parents):
        try:
            most, used = (one / limit).read_text().strip(), int((one / usage).read_text())
        except (OSError, ValueError):
            continue
        if most != "max" and int(most) < UNLIMITED:
            found.append(int(most) - used)
    return found
