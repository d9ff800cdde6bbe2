"""Unprivileged users, and commands that run as one of them. Needs root.

Commands run with the Python and the source of the tests. These may be below a folder that other
users can't access (/root): each command has a separate mount namespace in which only they are
accessible, and in which the users have accounts.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from needs import need

import paceline

VICTIM, ATTACKER, MEMBER = 54321, 54322, 54331
GROUP = 54400  # VICTIM and MEMBER are members


def missing() -> list[str]:
    """Return what this machine lacks to run commands as other users."""
    tools = [tool for tool in ("unshare", "setpriv") if shutil.which(tool) is None]
    return ["root"] * (os.geteuid() != 0) + tools


def command(user: int, words: Sequence[object], groups: Sequence[int] = ()) -> list[str]:
    """Return the command that runs ``words`` as ``user``. groups: IDs of additional groups."""
    need(missing())
    also = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", also, "--inh-caps=-all"]
    whole = [*drop, *map(str, words)]
    return ["unshare", "-m", "sh", "-c", f'set -e\n{_opened()}\nexec "$@"', "sh", *whole]


def run(user: int, *words: object, groups: Sequence[int] = (), **more: object):
    """Run a command as a user and wait; output is captured as text."""
    options = {"capture_output": True, "text": True, "timeout": 120, "env": _environment(user)}
    return subprocess.run(command(user, words, groups), **(options | more))


def start(user: int, *words: object, groups: Sequence[int] = (), **more: object):
    """Start a command as a user."""
    options = {"stdout": -1, "stderr": -1, "text": True, "env": _environment(user)}
    return subprocess.Popen(command(user, words, groups), **(options | more))


def python(user: int, code: str, *args: object, **more: object):
    """Run Python code as a user; return its output. The code must succeed."""
    done = run(user, sys.executable, "-c", code, *args, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def folder(path: Path, user: int, mode: int = 0o700, group: int | None = None) -> Path:
    """Create a folder owned by a user."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, user, user if group is None else group)
    path.chmod(mode)
    return path


def _environment(user: int) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return {**kept, "HOME": "/", "USER": str(user), "OMP_NUM_THREADS": "1"}


def _opened() -> str:
    """Return shell lines that make this Python and this source accessible to all users."""
    needed = {Path(paceline.__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)}
    needed |= {Path(__file__).parents[1]}
    by_gate: dict[Path, set[Path]] = {}
    for path in needed:
        for parent in reversed(path.resolve().parents):
            with contextlib.suppress(OSError):
                if not parent.stat().st_mode & 0o001:
                    by_gate.setdefault(parent, set()).add(path.resolve())
                    break
    lines = ["mount -t tmpfs tmpfs /mnt", *_accounts()]
    for gate, paths in by_gate.items():
        held = [(f"/mnt/{number}", path) for number, path in enumerate(sorted(paths))]
        lines += [f"mkdir {at}; mount --rbind '{path}' {at}" for at, path in held]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs '{gate}'")
        lines += [f"mkdir -p '{path}'; mount --rbind {at} '{path}'" for at, path in held]
    return "\n".join(lines)


def _accounts() -> list[str]:
    """Return shell lines that add the users' accounts to /etc in the command's namespace."""
    members = ",".join(f"user{user}" for user in (VICTIM, MEMBER))
    people = [f"user{user}:x:{user}:{user}::/:/bin/sh" for user in (VICTIM, ATTACKER, MEMBER)]
    lines = []
    for name, more in (("passwd", people), ("group", [f"paceline-test:x:{GROUP}:{members}"])):
        said = "\\n".join(more)
        lines.append(f"cp /etc/{name} /mnt/{name}; printf '{said}\\n' >> /mnt/{name}")
        lines.append(f"mount --bind /mnt/{name} /etc/{name}")
    return lines
