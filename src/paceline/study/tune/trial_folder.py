"""The folder of a trial: output, reports, answers and checkpoint, and the figures of its attempts.

Each attempt at a trial has files of its own: a process of an earlier attempt that has not ended yet
does not write into those of the next one.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ...record.trial_reports import Answer
from ...security.files import InvalidFileError, open_regular
from ...security.removal import REMOVED_PREFIX, TemporaryFolder, remove_from_marked
from ...security.schema import read_json
from ..study_folder import make_marked
from .searches.search import RUN_FIGURES

if TYPE_CHECKING:
    from optuna.trial import Trial

CHECKPOINT = "checkpoint"
COPY_PREFIX = ".checkpoint-"  # of a folder in which a copy of a checkpoint begins
MARK = "trial of a study"
MAX_END_BYTES = 1 << 16
POLL_S = 0.02
_ATTEMPT = re.compile(r"attempt-(\d{1,6})\.lock")


class End(msgspec.Struct, frozen=True):
    """How an attempt ended: written by its launcher.

    Attributes:
        code: Exit code of ``paceline run``.
        seconds: Wall time.
        nodes: Number of nodes; of one that it shares, its part.
    """

    code: Annotated[int, Meta(ge=-1000, le=1000)]
    seconds: Annotated[float, Meta(ge=0)]
    nodes: Annotated[float, Meta(ge=0)] = 1.0


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt at a trial."""

    folder: Path
    number: int

    def _file(self, name: str) -> Path:
        return self.folder / f"attempt-{self.number}.{name}"

    @property
    def lock(self) -> Path:
        """Held by all processes of the attempt on the runner's node."""
        return self._file("lock")

    @property
    def output(self) -> Path:
        return self._file("out")

    @property
    def reports(self) -> Path:
        return self._file("reports")

    @property
    def answers(self) -> Path:
        return self._file("answers")

    @property
    def summary(self) -> Path:
        return self._file("summary")

    @property
    def end_file(self) -> Path:
        return self._file("end")

    def end(self) -> End | None:
        """Return how it ended; None if it has not, or its launcher was killed."""
        try:
            return read_json(self.end_file, End, MAX_END_BYTES)
        except (FileNotFoundError, InvalidFileError):
            return None

    def forget_end(self) -> None:
        """Let the attempt count as interrupted: the trial is run again."""
        self.end_file.unlink(missing_ok=True)

    def answer(self, step: int, decision: str) -> None:
        """Answer a report. Raises OSError."""
        line = msgspec.json.encode(Answer(step, decision)) + b"\n"  # type: ignore[arg-type]
        fd = open_regular(self.answers, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def wait_until_ended(self, limit_s: float) -> bool:
        """Wait until all of its processes on this node have ended; return whether they have."""
        try:
            fd = open_regular(self.lock, os.O_RDWR)
        except OSError:
            return True
        limit = time.monotonic() + limit_s
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() > limit:
                        return False
                except OSError:  # the file system has no such locks
                    return True
                time.sleep(POLL_S)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def has_checkpoint(self) -> bool:
        """Whether the script has written to the folder of checkpoints."""
        try:
            return any(not path.name.startswith(".") for path in self.checkpoint.iterdir())
        except OSError:
            return False

    def take_checkpoint(self, other: "TrialFolder") -> None:
        """Begin with a copy of another trial's checkpoint: all of it, or none. Raises OSError."""
        left = (COPY_PREFIX, REMOVED_PREFIX + COPY_PREFIX)  # by a process that was killed
        for path in list(self.path.iterdir()):
            if path.name.startswith(left):
                remove_from_marked(path, MARK)
        with TemporaryFolder(COPY_PREFIX, self.path) as new:
            _copy_tree(other.checkpoint, new / CHECKPOINT)
            os.replace(new / CHECKPOINT, self.checkpoint)

    def remove_checkpoint(self) -> bool:
        """Remove the checkpoint if Paceline has created the trial's folder.

        Return whether there is none now.
        """
        if self.checkpoint.exists():
            try:
                remove_from_marked(self.checkpoint, MARK)
            except OSError:
                pass
        return not self.checkpoint.exists()

    def attempts(self) -> list[Attempt]:
        """Return the attempts, the last one at the end."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        numbers = [int(found[1]) for name in names if (found := _ATTEMPT.fullmatch(name))]
        return [Attempt(self.path, number) for number in sorted(numbers)]

    def begin_attempt(self) -> Attempt:
        """Create the files of the next attempt. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            make_marked(self.path, MARK)
        last = self.attempts()
        attempt = Attempt(self.path, last[-1].number + 1 if last else 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        os.close(open_regular(attempt.lock, flags, follow_links=False, mode=0o666))
        return attempt


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, without hidden files.

    Raises:
        OSError: Something can't be copied. It has the number of the first error: that of
            ``copytree`` has none.
    """
    try:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    except shutil.Error as error:
        _, name, text = error.args[0][0]
        if number := re.match(r"\[Errno (\d+)\] ", str(text)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(name)) from error
        raise


def good_attempts(folder: TrialFolder) -> list[Attempt]:
    """Return the attempts that went to the end of the script."""
    return [attempt for attempt in folder.attempts() if (end := attempt.end()) and end.code == 0]


def add_figures(
    trial: "Trial",
    added: dict[str, list[float]],
    ranks: int | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Store seconds and node-hours of attempts; those that are stored already count once.

    Args:
        trial: The trial.
        added: The figures by the number of the attempt.
        ranks: Number of ranks of the last attempt; None: as before.
        facts: What the summary of the last attempt tells; None: as before.
    """
    before = trial.user_attrs.get(RUN_FIGURES, {})
    attempts = {**added, **before.get("attempts", {})}
    figures = {
        **before,
        **(facts or {}),
        "ranks": ranks or before.get("ranks", 1),
        "seconds": sum(attempt[0] for attempt in attempts.values()),
        "node_hours": sum(attempt[1] for attempt in attempts.values()),
        "attempts": attempts,
    }
    if figures != before and attempts:
        trial.set_user_attr(RUN_FIGURES, figures)


def add_old_figures(trial: "Trial", folder: TrialFolder) -> None:
    """Store the figures of attempts that ended while no runner ran."""
    found = {
        str(attempt.number): [end.seconds, end.seconds / 3600 * end.nodes]
        for attempt in folder.attempts()
        if (end := attempt.end())
    }
    add_figures(trial, found)
