"""Remove old and unfinished checkpoints, and nothing else that has such a name.

A folder is a checkpoint if its manifest is valid and of the step in the name. It is an unfinished
one if it has the mark that ``UnfinishedFolder`` writes. Only files that Paceline has written are
removed: a folder with other files remains, with these.
"""

import contextlib
import os
import re
import stat
from pathlib import Path

from ..security.folders import open_folder
from ..security.removal import MARK, has_mark
from .manifest import MANIFEST, DamagedCheckpointError, Manifest, read_manifest
from .unfinished_folder import KIND

_STEP = re.compile(r"\.?step-(\d{8,18})")
# Files of an unfinished checkpoint: shards, the manifest, and both while they are written.
_WRITTEN = re.compile(r"\.?(rank-\d{5,}\.pt|manifest\.json)(\.\w+\.part)?")


def remove_checkpoint(path: Path) -> bool:
    """Remove a complete, incomplete or unfinished checkpoint; never raises.

    Returns:
        Whether the path no longer exists. It remains if Paceline has not written it.
    """
    with contextlib.suppress(OSError):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):  # its target remains
            path.unlink()
        elif stat.S_ISDIR(mode):
            _remove_folder(path)
        elif not path.lstat().st_size:  # the token of a start that was interrupted
            path.unlink()
    return not os.path.lexists(path)


def _remove_folder(path: Path) -> None:
    opened = open_folder(path)
    try:
        last = [MANIFEST, MARK]  # the proofs
        manifest = _manifest(path, opened)
        names = [] if manifest is None else [entry["name"] for entry in manifest["files"]]
        if has_mark(opened, KIND):
            names += [name for name in os.listdir(opened) if _WRITTEN.fullmatch(name)]
        elif manifest is None:
            last = []
        for name in [*(name for name in names if name not in last), *last]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
    path.rmdir()  # only an empty folder


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has the manifest of the checkpoint whose name it has."""
    try:
        opened = open_folder(path)
    except OSError:
        return False
    try:
        return _manifest(path, opened) is not None
    finally:
        os.close(opened)


def replaces(final: Path | None, old: Path) -> bool:
    """Return whether a checkpoint with its final name replaces an older one of the same user."""
    if final is None or not is_checkpoint(final):
        return False
    return final.stat().st_uid == old.stat().st_uid


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint has a manifest, and all shards of the right size."""
    try:
        entries = read_manifest(path)["files"]
        return is_checkpoint(path) and all(
            (path / one["name"]).lstat().st_size == one["bytes"] for one in entries
        )
    except (OSError, DamagedCheckpointError):
        return False


def _manifest(path: Path, opened: int) -> Manifest | None:
    """Return the manifest of an open folder, if it is of the step in the folder's name."""
    step = _STEP.match(path.name)
    try:
        found = read_manifest(path, opened)
    except DamagedCheckpointError:
        return None
    return found if step and found.get("step") == int(step[1]) else None
