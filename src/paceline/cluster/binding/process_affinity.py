"""CPU affinity and memory policy of running processes and their threads, read from /proc."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """The CPU affinity and memory policy of one process.

    Attributes:
        name: Name of its command.
        cpus: Affinity of its first thread, such as "0-3,8".
        threads: Number of its threads.
        memory: Memory policy, such as "default" or "prefer:0"; empty if it cannot be read.
        others: Number of threads for each other affinity.
    """

    pid: int
    name: str
    cpus: str
    threads: int
    memory: str
    others: dict[str, int] = field(default_factory=dict)


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """Return the affinity of a process, or None if it has ended."""
    folder = proc / str(pid)
    try:
        name = (folder / "comm").read_text().strip()
        masks = {int(task): _mask(folder / "task" / task) for task in os.listdir(folder / "task")}
    except OSError:
        return None
    first = masks.get(pid, "")
    others = Counter(mask for mask in masks.values() if mask not in (first, ""))
    return Process(pid, name, first, len(masks), _policy(folder), dict(others))


def child_processes(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the pids of all descendants of a process."""
    found: list[int] = []
    try:
        tasks = os.listdir(proc / str(pid) / "task")
    except OSError:
        return found
    for task in tasks:  # the kernel lists a child under the thread that started it
        try:
            text = (proc / str(pid) / "task" / task / "children").read_text()
        except OSError:
            continue
        for child in map(int, text.split()):
            found += [child, *child_processes(child, proc)]
    return sorted(found)


def _mask(task: Path) -> str:
    """Return the affinity of a thread; empty if the thread has ended."""
    try:
        for line in (task / "status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _policy(folder: Path) -> str:
    """Return the memory policy of the heap, which follows the process's policy."""
    try:
        for line in (folder / "numa_maps").read_text().splitlines():
            fields = line.split()
            if len(fields) > 1 and ("heap" in fields or "stack" in fields):
                return fields[1]
    except OSError:
        pass
    return ""
