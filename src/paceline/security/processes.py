"""Start Python and other programs, and import the user's modules, without files of other users.

``python -c`` and ``python -m`` put the working directory first on ``sys.path``, and an empty or
relative entry of PATH means the working directory. In ``/tmp``, a file ``json.py`` or ``srun`` of
another user would be executed. Paceline therefore starts Python only by ``python_command``, other
programs only by ``program_command``, and adds folders to ``sys.path`` only as ``import_folders``
does.
"""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from .folders import writable_by_others
from .text import printable


def python_command(*words: str, interpreter: str | None = None) -> list[str]:
    """Return the command that starts Python without the working directory on ``sys.path``.

    Args:
        words: Options and arguments of Python, for example "-m" and a module.
        interpreter: Path of the interpreter; None: that of this process.
    """
    return [interpreter or sys.executable, "-P", *words]


def find_program(name: str) -> str | None:
    """Return the path of a program in an absolute entry of PATH, or None.

    A name with ``/`` is a path.
    """
    given = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, given)))


def program_command(name: str, *words: str) -> list[str]:
    """Return the command that starts a program on PATH.

    Raises:
        FileNotFoundError: It is not on PATH.
    """
    found = find_program(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return [found, *words]


def run_program(
    name: str, *words: str, seconds: float | None = None, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program on PATH to its end, and return its exit code and output.

    Args:
        seconds: Time limit, or None.
        text: Its standard input; None: that of this process.

    Raises:
        OSError: It can't be started, or does not end in time.
    """
    command = program_command(name, *words)
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{name} has not ended after {seconds:g} s") from None


def stat_fields(process: int | str) -> list[str]:
    """Return the fields of /proc/PROCESS/stat from the state on; [] if the process has ended.

    process: PID, or the path of a thread, such as "self/task/123".
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks; None if it has ended."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def kernel_id(namespace: str) -> str:
    """Return an ID of the running kernel and of this process's namespace; "" if not on Linux.

    namespace: Its kind, for example "pid".
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def import_folders(folder: str) -> list[str]:
    """Return ``sys.path`` with the folder of the user's script or modules.

    It is the first one, same as for ``python SCRIPT`` and ``python -m``. If other users can add
    files to it, it is the last one: their files do not replace modules that are installed.
    """
    return [*sys.path, folder] if is_open(folder) else [folder, *sys.path]


def module_folders(name: str) -> list[str]:
    """Return ``sys.path`` for ``-m NAME``: with the working directory, if the module is the user's.

    Paceline starts modules of its own in the same way, which need no other folder.
    """
    is_own = name.partition(".")[0] == __name__.partition(".")[0]
    return list(sys.path) if is_own else import_folders(os.getcwd())


def drop_working_directory() -> None:
    """Remove the working directory, which ``python -m`` has put first on ``sys.path``."""
    if not sys.flags.safe_path and sys.path[:1] == [_working_directory()]:
        del sys.path[0]


def warn_of_working_directory() -> None:
    """Warn if Python imports modules from a working directory to which other users add files."""
    folder = _working_directory()
    if folder in sys.path and is_open(folder):
        sys.stderr.write(
            f"paceline: warning: Python imports modules from {printable(folder)}, where other "
            "users can add files. HINT: use another working directory, or remove it from "
            "PYTHONPATH (an empty entry is the working directory)\n"
        )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def is_open(folder: str) -> bool:
    """Whether other users can add files to a folder, but not replace the user's own in it.

    Members of a group that can write to a folder without sticky bit can replace the script itself.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return False
    if not status.st_mode & stat.S_ISVTX:
        return bool(status.st_mode & 0o002)
    return writable_by_others(status)
