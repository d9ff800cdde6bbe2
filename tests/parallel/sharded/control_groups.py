"""Control groups that limit the memory of single processes, for tests that run as root."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_numbers = itertools.count()

# Runs in a rank: join its group; later limit what it may take more than now.
SCRIPT = """
import os
from pathlib import Path

GROUP = Path(os.environ["MEMORY_GROUPS"], os.environ.get("RANK", "0"))
(GROUP / "cgroup.procs").write_text(str(os.getpid()))

def limit_memory(nbytes):
    lines = (GROUP / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    limit = stat.get("anon", stat.get("rss", 0)) + nbytes
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max"):
        if (GROUP / name).exists():
            (GROUP / name).write_text(str(limit))
    if (GROUP / "memory.swap.max").exists():
        (GROUP / "memory.swap.max").write_text("0")
"""


def parent_group() -> tuple[Path | None, str]:
    """Return the folder in which groups can be made, and the reason if there is none."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    if "memory" in own:  # version 1
        folders = [Path("/sys/fs/cgroup/memory" + own["memory"])]
    else:
        group = Path("/sys/fs/cgroup" + own.get("", "/"))
        folders = [
            folder
            for folder in (group, group.parent)
            if "memory" in _text(folder / "cgroup.subtree_control").split()
        ]
    for folder in folders:
        if os.geteuid() == 0 and os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists():
            return folder, ""
    return None, "needs root, and a control group in which groups with a limit can be made"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def memory_groups(parent: Path, count: int) -> Iterator[Path]:
    """Make a folder of control groups "0" to "count - 1"; end their processes and remove them."""
    base = parent / f"paceline-{os.getpid()}-{next(_numbers)}"
    groups = [base / str(number) for number in range(count)]
    base.mkdir()
    try:
        if (base / "cgroup.subtree_control").exists():
            (base / "cgroup.subtree_control").write_text("+memory")
        for group in groups:
            group.mkdir()
        yield base
    finally:
        for group in filter(Path.exists, groups):
            _remove(group)
        base.rmdir()


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
