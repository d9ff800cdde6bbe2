"""The folder of a study: it is new, one command at a time works in it, and its runs have folders.

A second command would take the folders of running runs for those of killed ones, and remove them.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ..analyze.scaling.study_folder import FIGURES_FILE, RUNS_FOLDER
from ..analyze.scaling.study_model import Setup
from ..security.files import UnsafeFileError
from ..security.folders import open_folder
from ..security.removal import remove_from_marked, remove_marked, write_mark
from ..security.run_lock import NAME, RunLock

MARK = "run of a scaling study"
SCRATCH_FOLDER = "scratch"  # for files that the script writes
FIRST = "first-"  # prefix of a run that is not stored
SCALE_WAY_OUT = (
    "wait until it has ended, or end it. paceline scale --show prints what has been measured until "
    "now"
)


def create_folder(folder: Path, study_file: str) -> None:
    """Create the folder of ``paceline scale --output``.

    Raises:
        ValueError: It exists and is not empty.
        OSError: It can't be created.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_study = (folder / study_file).exists()
        what = "has a study already" if is_study else "exists and is not empty"
        hint = f"paceline scale --continue {folder}" if is_study else "name a new folder"
        raise ValueError(f"--output {folder} {what}. HINT: {hint}")
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked_study(
    folder: Path, say: Callable[[str], None], names: Sequence[str] = (NAME,), way_out: str = ""
) -> Iterator[None]:
    """Keep other commands from working on a study.

    Args:
        folder: The study's folder.
        say: Receives what happens.
        names: Names of the locks: commands that have none in common do not exclude each other.
        way_out: See ``RunLock``.

    Raises:
        FolderInUseError: Another command works on it.
        OSError: The lock can't be written.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            lock = RunLock(folder, "study", name=name, way_out=way_out)
            lock.acquire(say)
            stack.callback(lock.release)
            lock.keep(say)
        yield


@contextlib.contextmanager
def locked_sizes(
    folder: Path, say: Callable[[str], None], sizes: Iterable[int] | None = None
) -> Iterator[None]:
    """Keep other commands from measuring sizes of a scaling study. Raises as ``locked_study``.

    The jobs of ``--submit`` measure one size each at the same time: each size has its own lock.

    Args:
        folder: The study's folder.
        say: Receives what happens.
        sizes: The sizes that this command measures; None: all of them, and their jobs.
    """
    names = [NAME] if sizes is None else [f".paceline-run-n{size}.json" for size in sorted(sizes)]
    with locked_study(folder, say, names, SCALE_WAY_OUT):
        yield


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
            make_marked(path, MARK)
        except FileExistsError:
            repeat += 1
            continue
        return path, repeat


def make_marked(path: Path, mark: str) -> None:
    """Create a folder that Paceline may remove with its content. Raises OSError."""
    path.mkdir(parents=True)
    fd = open_folder(path)
    try:
        write_mark(fd, mark)
    finally:
        os.close(fd)


def remove_run(path: Path) -> None:
    """Remove the folder of a run that was ended, as far as possible."""
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
