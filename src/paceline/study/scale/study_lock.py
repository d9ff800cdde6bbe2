"""Lock of a study's folder: one command at a time runs or submits what is missing.

A second one would take the folders of running runs for those of killed ones, and remove them. The
jobs of ``--submit`` measure one size each at the same time: each size has its own lock.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from ...security.run_lock import NAME, RunLock

WAY_OUT = (
    "wait until it has ended, or end it. paceline scale --show prints what has been measured until "
    "now"
)


@contextlib.contextmanager
def locked_study(
    folder: Path, say: Callable[[str], None], sizes: Collection[int] | None = None
) -> Iterator[None]:
    """Keep other commands from working on a study.

    Args:
        folder: The study's folder.
        say: Receives what happens.
        sizes: The sizes that this command measures; None: all of them, and their jobs.

    Raises:
        FolderInUseError: Another command works on it.
        OSError: The lock can't be written.
    """
    names = [NAME] if sizes is None else [f".paceline-run-n{one}.json" for one in sorted(sizes)]
    with contextlib.ExitStack() as stack:
        for name in names:
            lock = RunLock(folder, "study", name=name, way_out=WAY_OUT)
            lock.acquire(say)
            stack.callback(lock.release)
            lock.keep(say)
        yield
