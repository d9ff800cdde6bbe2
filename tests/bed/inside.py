"""Start and list processes inside a host."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ranks

_LAUNCHERS = ("SLURM", "SBATCH", "SRUN", "OMPI_", "PMI", "PALS_", "FLUX_", "LS", "PBS", "JSM_")
_libc = ctypes.CDLL(None, use_errno=True)


def environment(**more: str) -> dict[str, str]:
    """Return ``ranks.environment()`` without variables of a scheduler that runs the tests."""
    kept = ranks.environment().items()
    return {n: v for n, v in kept if not n.startswith(_LAUNCHERS)} | more


def start(
    first: int, command: list[str], cwd: Path, env: dict[str, str], **options: Any
) -> subprocess.Popen[str]:
    """Start a process in the host whose first process is ``first``.

    The process is a direct child of this process and leads a new session. ``nsenter`` is not used,
    because with a PID namespace it forks and does not forward signals.
    """
    enter = ["nsenter", "-t", str(first), "-m", "-u", "-i", "-n", "--", "env", "-C", str(cwd)]
    with _children_born_in(first):
        return subprocess.Popen(
            [*enter, *command],
            env=environment(**env),
            text=True,
            start_new_session=True,
            **{
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )


@contextmanager
def _children_born_in(first: int) -> Iterator[None]:
    _set_namespace(f"/proc/{first}/ns/pid")
    try:
        yield
    finally:
        _set_namespace("/proc/self/ns/pid")


def _set_namespace(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}", path)
    finally:
        os.close(file)


def processes(firsts: dict[str, int]) -> dict[tuple[str, int, str], str]:
    """Return the processes in the hosts: (host, PID, start time) and the command line.

    ``firsts`` maps each host to the PID of its first process.
    """
    spaces = {_link(first): name for name, first in firsts.items()}
    found = {}
    for entry in Path("/proc").iterdir():
        host = spaces.get(_link(int(entry.name))) if entry.name.isdigit() else None
        if host is None:
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[host, int(entry.name), fields[19]] = line.strip()
    return found


def _link(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
