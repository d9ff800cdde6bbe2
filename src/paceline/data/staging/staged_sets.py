"""Locate, open and start to stage the datasets that this node has in a staging folder.

The folders of this user are in ROOT/paceline-stage-UID, those shared with a group in
ROOT/paceline-stage-group-GID.
"""

import errno
import multiprocessing
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from ...record.ring.launcher_messages import notify
from ...security.files import UnsafeFileError
from ...security.folders import Folder, own_group
from ...security.processes import python_command
from ...security.text import printable
from ..format import shard_format

PLACE, VARIABLE = "paceline-stage", "PACELINE_STAGE"
SETS = "PACELINE_STAGE_SETS"  # datasets given to ``paceline run --stage``
LAST_USED = ".used"  # its modification time: when the dataset was last staged or opened


def staged_path(origin: Path, root: Path, group: int | None = None) -> Path:
    """Return the path of a staged dataset, for this user or for a group; it need not exist."""
    checksum = shard_format.read_meta_checksum(origin)
    whose = f"{os.geteuid()}" if group is None else f"group-{group}"
    return root / f"{PLACE}-{whose}" / f"{origin.resolve().name}-{checksum}"


def open_staged(origin: Path, root: Path, group: int | None = None, make: bool = False) -> Folder:
    """Open the folder of a staged dataset.

    Args:
        make: Whether to create the folder and its parents if they do not exist.

    Raises:
        UnsafeFileError: The folder does not belong to this user, or to the group.
        OSError: The folder can't be opened.
    """
    path = staged_path(origin, root, group)
    if make:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root)) from None
        Folder.make(path.parent, group, exist_ok=True).close()
    with Folder.open(path.parent, group) as own:
        return own.subfolder(path.name, make)


def touch(folder: Folder) -> None:
    """Record that a dataset is used now. Raises OSError."""
    fd = open_or_create(folder, LAST_USED)
    try:
        os.utime(fd)
    finally:
        os.close(fd)


def open_or_create(folder: Folder, name: str) -> int:
    """Open or create a file that everyone who may write to the folder can write to."""
    if folder.group is not None and folder.status(name) is None:
        folder.make_file(name, 0o660)
    return folder.open_file(name, os.O_RDWR | os.O_CREAT)


def start_staging_all() -> None:
    """Start to stage the datasets given to ``paceline run --stage``, at the start of a rank.

    Staging begins on all nodes before the script opens the datasets.
    """
    root = os.environ.get(VARIABLE)
    for origin in filter(None, os.environ.get(SETS, "").split(os.pathsep)):
        try:
            start_staging(Path(origin), Path(root or ""))
        except (OSError, ValueError):  # reported when the script opens the dataset
            continue


def open_staged_here(origin: Path) -> Folder | None:
    """Open the dataset's folder on this node, if some of it was staged to $PACELINE_STAGE.

    It may have been staged by this user, or by a member of the group that owns the dataset. Return
    None otherwise.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    start_staging(origin, Path(root))
    group = origin.stat().st_gid
    for whose in (None, group) if own_group(group) else (None,):
        try:
            folder = open_staged(origin, Path(root), whose)
            with suppress(OSError):  # for example a read-only disk
                touch(folder)
            return folder
        except UnsafeFileError as error:
            if error.filename not in _refused:
                _refused.add(error.filename)
                why = f"{printable(str(error.filename))} {error.strerror}"
                notify(f"paceline: {why}. It is not used; {origin} is read instead\n")
        except OSError:
            continue
    return None


_refused: set[str] = set()  # folders of other users, each reported once
_begun: dict[Path, "subprocess.Popen[bytes]"] = {}  # staging processes that this process started


def start_staging(origin: Path, root: Path) -> None:
    """Start to stage a dataset, if it was given to ``paceline run --stage``.

    The first rank of each node starts a process that stages during training and ends with it.
    """
    if str(origin.resolve()) not in os.environ.get(SETS, "").split(os.pathsep):
        return
    folder = staged_path(origin, root)
    with suppress(OSError):  # reported by the staging process
        open_staged(origin, root, make=True).close()  # in which all ranks search staged shards
    first = os.environ.get("LOCAL_RANK", "0") == "0" and multiprocessing.parent_process() is None
    if first and folder not in _begun:
        words = python_command("-m", "paceline", "stage", "--beside", str(origin))
        quiet = subprocess.DEVNULL
        _begun[folder] = subprocess.Popen(words, stdin=quiet, stdout=quiet)
