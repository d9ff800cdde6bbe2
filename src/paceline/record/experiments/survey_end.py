"""The survey of ``paceline diagnose``: when it ends, and the sampler of its GPU kernels."""

import os
import time
from pathlib import Path
from typing import Any

from ..hooks.gpu_kernels import KernelSampler
from .rung import Rung

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


def sampler_of_run(rung: Rung | None, *args: Any) -> KernelSampler | None:
    """Return the sampler of a run, or of an experiment of ``paceline diagnose``.

    Sampling slows steps down, and the steps of experiments are compared with each other. So only
    the survey has a sampler, for steps after the measured ones.

    Args:
        rung: The experiment; None: the run is none.
        args: Of KernelSampler.
    """
    if rung is not None and not rung.survey_until:
        return None
    sampler = KernelSampler(*args)
    if rung is not None:
        sampler.first = rung.warm + rung.steps + 1
    return sampler
