"""Folders of the runs in a study's folder: created, cleaned up and removed."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ...analyze.scaling.study_folder import FIGURES_FILE, RUNS_FOLDER
from ...analyze.scaling.study_model import Setup
from ...security.files import UnsafeFileError
from ...security.folders import open_folder
from ...security.removal import remove_from_marked, remove_marked, write_mark

MARK = "run of a scaling study"
SCRATCH_FOLDER = "scratch"  # for files that the script writes
FIRST = "first-"  # prefix of a run that is not stored


def new_run_folder(study: Path, setup: Setup, prefix: str = "") -> tuple[Path, int]:
    """Create the folder of the next run of a setup; return it with the run's number.

    All hosts of a run must see its folder, also that of a first run, so it is in the study's.
    Jobs that measure a setup at the same time get different numbers. Raises OSError.
    """
    runs, repeat = study / RUNS_FOLDER, 0
    runs.mkdir(exist_ok=True)
    while True:
        path = runs / f"{prefix}{setup.name}-{repeat}"
        try:
            path.mkdir()
        except FileExistsError:
            repeat += 1
            continue
        fd = open_folder(path)
        try:
            write_mark(fd, MARK)
        finally:
            os.close(fd)
        return path, repeat


def remove_run(path: Path) -> None:
    """Remove a run that did not end by itself, as far as possible."""
    with contextlib.suppress(OSError, UnsafeFileError):
        remove_marked(path, MARK)


def remove_scratch(path: Path) -> None:
    """Remove what the script of a run has written, as far as possible."""
    with contextlib.suppress(OSError, UnsafeFileError):
        remove_from_marked(path / SCRATCH_FOLDER, MARK)


def remove_unfinished(study: Path, sizes: Iterable[int]) -> None:
    """Remove the runs on these numbers of ranks that were killed. Nothing may run in them."""
    for ranks in sizes:
        for prefix in ("", FIRST):
            for path in (study / RUNS_FOLDER).glob(f"{prefix}n{ranks}-*"):
                if not (path / FIGURES_FILE).exists():
                    remove_run(path)
