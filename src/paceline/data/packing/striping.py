"""Striping of packed datasets on Lustre: the number of storage targets (OSTs) of a file.

A file without striping lies on one OST, and is read at the speed of one.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...cluster.topology.local_resources import file_system_type
from ...security.processes import program_command

SHARD_STRIPES = 4  # of a file among many
SINGLE_FILE_STRIPES = 16  # of a format that writes one large file
SINGLE_FILE_FORMATS = ("hdf5", "lmdb")
STRIPE_SIZE = "4M"
AUTO, ALL = "auto", "all"
LFS_TIMEOUT_S = 30.0
# Layouts of several components, whose number of stripes grows with the file (Progressive File
# Layouts), are the site's choice and are left alone.
COMPOSITE = "lcm_"


@dataclass(frozen=True)
class Layout:
    """The default layout of new files in a folder on Lustre.

    Attributes:
        stripes: Number of OSTs of a file; None if it is unknown or grows with the file.
        targets: Number of OSTs of the file system; None if unknown.
    """

    stripes: int | None
    targets: int | None


def layout_of(path: Path) -> Layout | None:
    """Return the layout of the nearest existing folder of a path; None if it is not on Lustre."""
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if file_system_type(folder) != "lustre":
        return None
    output = _lfs("getstripe", "-d", str(folder))[0]
    count = re.search(r"stripe_count:\s*(-?\d+)", output)
    osts = re.findall(r"^\d+:.*\bACTIVE\b", _lfs("osts", str(folder))[0], re.MULTILINE)
    stripes = int(count[1]) if count is not None and COMPOSITE not in output else None
    return Layout(stripes or (1 if stripes == 0 else None), len(osts) or None)  # 0: the default, 1


def stripe_count(to: str | None, layout: Layout) -> int:
    """Return the number of stripes for a packed dataset, or one in the format ``to``."""
    wanted = SINGLE_FILE_STRIPES if to in SINGLE_FILE_FORMATS else SHARD_STRIPES
    return min(wanted, layout.targets or wanted)


def propose(path: Path, to: str | None) -> str:
    """Return a message with the command that stripes the files of ``path``.

    Empty if the path is not on Lustre, or its new files lie on as many OSTs already.
    """
    layout = layout_of(path)
    if layout is None or layout.stripes is None:
        return ""
    count = stripe_count(to, layout)
    if layout.stripes < 0 or layout.stripes >= count:  # below 0: all OSTs
        return ""
    of = f" of {layout.targets}" if layout.targets else ""
    before = "" if to is not None else f"mkdir -p {_quoted(path)} && "
    where = f"{before}{command_line(path, str(count))}"
    manual = f", or before packing: {where}" if to is None else ""
    return (
        f"{path} is on Lustre, where each new file is on {layout.stripes}{of} storage targets, "
        f"which limits its bandwidth. HINT: --stripe {count}{manual}"
    )


def command_line(path: Path, count: str) -> str:
    """Return the command that sets the layout of a folder, or of a file that does not exist yet."""
    return " ".join(["lfs", *_setstripe(count), _quoted(path)])


def stripe(path: Path, count: str, to: str | None) -> None:
    """Set the layout of the files to be written at ``path``.

    ``path``: the file of a format that writes one (hdf5), which is created; else the folder.
    ``count``: a number, ALL, or AUTO.

    Raises:
        ValueError: The path is not on Lustre, or ``lfs`` fails.
    """
    layout = layout_of(path)
    if layout is None:
        kind = file_system_type(path) or "unknown"
        raise ValueError(
            f"--stripe {count}: {path} is not on Lustre (file system: {kind}). HINT: leave out "
            "--stripe"
        )
    if count == AUTO:
        count = str(stripe_count(to, layout))
    if to != "hdf5":
        path.mkdir(parents=True, exist_ok=True)
    output, failed = _lfs(*_setstripe("-1" if count == ALL else count), str(path))
    if failed:
        raise ValueError(
            f"--stripe {count}: `{command_line(path, count)}` failed: {failed or output}. "
            "HINT: run the command yourself, or leave out --stripe"
        )


def check_count(text: str) -> str:
    """Return the value of ``--stripe``.

    Raises:
        ValueError: It is neither a positive number nor ALL or AUTO.
    """
    if text not in (AUTO, ALL) and not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise ValueError(
            f"--stripe must be a number of storage targets, all or auto; this is {text!r}. "
            "HINT: --stripe auto"
        )
    return text


def _setstripe(count: str) -> list[str]:
    return ["setstripe", "-c", "-1" if count == ALL else count, "-S", STRIPE_SIZE]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _lfs(*words: str) -> tuple[str, str]:
    """Return the output of an ``lfs`` command, and why it failed (empty if it did not)."""
    try:
        done = subprocess.run(
            program_command("lfs", *words),
            capture_output=True,
            text=True,
            timeout=LFS_TIMEOUT_S,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{getattr(error, 'strerror', None) or error}"
    if done.returncode:
        return "", done.stderr.strip() or f"exit code {done.returncode}"
    return done.stdout, ""
