"""How much may be written to a folder: of a disk what is free, of memory what the job may use."""

import os
from pathlib import Path

KEPT = 0.1  # of what is free stays so
IN_MEMORY = ("tmpfs", "ramfs")
UNLIMITED = 1 << 60  # and more is what a control group without a limit says


def free(folder: Path) -> int:
    """Bytes. What lies in /dev/shm counts as memory of the job, which a scheduler ends when it
    takes more than it asked for."""
    told = os.statvfs(folder)
    found = told.f_bavail * told.f_frsize
    if kind_of(folder) in IN_MEMORY:
        found = min([found, *_memory()])
    return max(int((1 - KEPT) * found), 0)


def kind_of(folder: Path) -> str:
    """The kind of the file system that it is on."""
    best, kind = "", ""
    path = str(folder.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        mount = mount.replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def _memory() -> list[int]:
    """What the host, and the control groups that this process is in, have left."""
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
