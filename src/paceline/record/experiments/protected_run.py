"""A run of the user's script for a measurement: its files are protected, and it may end early.

``PACELINE_STEP_LIMIT`` holds ``StepLimit.to_json()``. The process ends at once after the last step:
the rest of the script and its exit handlers do not run. An experiment of ``paceline diagnose``
(experiment.py) is such a run with phases. The survey of a diagnosis and the runs of ``paceline
verify`` end at a step on which their ranks agree (``SurveyEnd``).
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ...security.folders import Folder
from ...security.removal import remove_marked, write_mark
from ..ring.launcher_messages import notify, send_to_launcher
from ..ring.recorder import Recorder
from .protect_files import FileProtection

SCRATCH = "scratch"  # kind of the scratch folder's mark
STEP_LIMIT_VARIABLE = "PACELINE_STEP_LIMIT"


@dataclass(frozen=True)
class StepLimit:
    """Limits of a run.

    Attributes:
        steps: Optimizer steps after which the process ends; 0: the script decides.
        scratch: Folder for the checkpoints of ``world.epochs``, which all ranks of a node share.
        covered: Folders of the user that an overlay covers, so that they need no other protection.
        branches: Whether ``world.epochs`` resumes from the script's own checkpoint; what it saves
            goes to ``scratch`` in any case.
    """

    steps: int
    scratch: str = ""
    covered: tuple[str, ...] = ()
    branches: bool = False

    def to_json(self) -> str:
        """Return the value of the environment variable ``STEP_LIMIT_VARIABLE``."""
        return msgspec.json.encode(self).decode()


def limit_of_process(environment: Mapping[str, str] = os.environ) -> StepLimit | None:
    """Return the limits of this process; None if it has none."""
    text = environment.get(STEP_LIMIT_VARIABLE)
    return msgspec.json.decode(text, type=StepLimit) if text else None


class ProtectedRun:
    """What a measured run does in this process: protect files, count steps, end the process.

    Args:
        limit: Its limits.
        recorder: The recorder, which calls ``after_step`` at the end of every optimizer step.
        detach: Ends the recording.
    """

    def __init__(self, limit: StepLimit, recorder: Recorder, detach: Callable[[], None]) -> None:
        self.limit, self.recorder, self._detach = limit, recorder, detach
        self._steps = 0  # of this process; a resumed run has made others before
        self._results: dict[str, Any] = {}
        self._file_protection: FileProtection | None = None

    def install(self) -> None:
        """Patch Python and torch. Must precede the recorder's own hooks, which then wrap these."""
        if self.limit.scratch:
            _make_scratch(Path(self.limit.scratch))
            limit = self.limit
            self._file_protection = FileProtection(self._stop, limit.covered, limit.scratch)
            self._file_protection.install()

    def place(self, path: str | Path) -> Path:
        """Return the folder that replaces a checkpoint's folder during the run."""
        return Path(self.limit.scratch) / Path(path).name if self.limit.scratch else Path(path)

    def after_step(self) -> None:
        """End the process after the last step."""
        self._steps += 1
        if 0 < self.limit.steps <= self._steps:
            self._finish()

    def write_results(self) -> None:
        """Write the results so far into the record's header."""
        if self._results:
            self.recorder.update_header(rung=self._results)

    def _stop(self, why: str) -> NoReturn:
        """End the run because the script is about to change a file of the user."""
        self._results["stopped"] = why
        notify(f"paceline: the experiment stops: {why}\n")
        self._finish()

    def _end_kernels(self) -> None:
        """Write a GPU's kernels of the steps so far; a failure ends no run."""
        try:
            if self.recorder.kernel_sampler is not None:
                self.recorder.kernel_sampler.finish()
        except Exception as error:
            notify(f"warning: Paceline could not read the GPU's kernels: {error}\n")

    def _complete(self) -> None:
        """End the measurements."""

    def _finish(self) -> NoReturn:
        """Write the results into the record and end this process without exit handlers."""
        self._end_kernels()
        self._complete()
        if self.recorder.step_watch is not None:
            self.recorder.step_watch.flush()
        self.write_results()
        self._detach()
        if self._file_protection is not None:
            self._file_protection.is_disabled = True
            _remove_scratch(Path(self.limit.scratch))
        sys.stdout.flush()
        sys.stderr.flush()
        send_to_launcher(finished=0)
        os._exit(0)


def _make_scratch(folder: Path) -> None:
    """Create the scratch folder, if it does not exist.

    Raises:
        UnsafeFileError: Another user has created it.
        OSError: It can't be created.
    """
    if not folder.parent.exists():  # on another node than the launcher's
        Folder.make(folder.parent, exist_ok=True).close()
    with Folder.make(folder, exist_ok=True) as made:
        if not made.names():
            write_mark(made.fd, SCRATCH)


def _remove_scratch(folder: Path) -> None:
    """Remove the scratch folder and its parent, if that is empty. Never raises."""
    with suppress(OSError):
        remove_marked(folder, SCRATCH)
        folder.parent.rmdir()


# The last step of a run that goes on until its ranks have seen enough


EPOCHS = 1.25  # enough to see the end of the first one, and what follows it
MAX_STEPS = 2000
STEPS_AHEAD = 3  # by which ranks can differ when one of them sees that the survey is over


class SurveyEnd:
    """The agreement of the ranks on the last step, in a file that the first of them writes.

    Args:
        folder: A folder that all ranks of the node share.
        until_s: On the clock of ``time.monotonic``.
        least_step: The survey does not end before this step.
    """

    def __init__(self, folder: Path, until_s: float, least_step: int = 0) -> None:
        self._file, self._until_s = folder / "survey-end", until_s
        self._least_step = least_step
        self._last_step: int | None = None

    def is_over(self, step: int, epoch_steps: float, has_room: bool) -> bool:
        """Return whether the survey ends after this step.

        Args:
            step: Number of steps so far.
            epoch_steps: Number of batches of an epoch; infinite if it is not known.
            has_room: Whether the record has room for more events.
        """
        if not self._until_s:
            return True
        if self._last_step is None:
            enough = step >= min(EPOCHS * epoch_steps, MAX_STEPS)
            if enough or not has_room or time.monotonic() > self._until_s:
                self._propose(max(step + STEPS_AHEAD, self._least_step))
            self._last_step = self._agreed()
        return self._last_step is not None and step >= self._last_step

    def _propose(self, step: int) -> None:
        own = self._file.with_name(f"survey-end-{os.getpid()}")
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"{step}")
        try:
            os.link(own, self._file)
        except FileExistsError:  # another rank was first
            pass

    def _agreed(self) -> int | None:
        try:
            return int(self._file.read_text())
        except OSError:
            return None
