"""Short runs of the user's script for ``paceline diagnose``.

Each run is a separate, recorded ``paceline run`` process with a rung (record/experiments/rung.py)
and settings (knobs/settings.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...analyze.records.load_run import Run
from ...plurals import counted
from ...record.experiments.rung import RUNG_VARIABLE, Rung
from ..script_runs.run_process import Deadline
from ..trials import ScriptRequest, Trials, TrialSpec, on_first_host

OUT_OF_TIME = "the time budget was used up"


@dataclass(frozen=True)
class RunRequest(ScriptRequest):
    """The user's request to ``paceline diagnose``.

    Attributes:
        steps: Measured steps of each phase, or None to choose the number from the budget.
        warm: Warm-up steps before the measured ones.
        count: Whether to count the FLOPs of a step.
        settings: Knobs that are set in all runs.
        deadline: When the last run ends; None if no time has been measured yet.
    """

    steps: int | None = None
    warm: int = 5
    count: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    deadline: Deadline | None = None

    @property
    def typed_options(self) -> list[str]:
        """The options that select the ranks and how they run, as the user typed them."""
        ranks = [] if self.ranks is None else ["-n", str(self.ranks)]
        return [*self.where, *ranks, *self.options]

    @property
    def warming(self) -> int:
        """Number of warm-up steps.

        With the knob "loader-workers" they are increased, so that every worker has started and has
        made two batches before the measurement.
        """
        return self.warm + 2 * int(self.settings.get("loader-workers", 0))


class FailedError(ValueError):
    """A run failed.

    Attributes:
        steps: Number of steps before the failure.
        short: The error in one line.
    """

    def __init__(self, text: str, steps: int, short: str) -> None:
        super().__init__(text)
        self.steps, self.short = steps, short


class OutOfTimeError(ValueError):
    """A run was ended, or not started, because its time was over.

    Attributes:
        run: Record until then, or None.
    """

    def __init__(self, minutes: float, run: Run | None = None) -> None:
        super().__init__(
            f"{OUT_OF_TIME}. HINT: --minutes {math.ceil(2 * minutes)} instead of {minutes:g}"
        )
        self.run = run


class Runner(Trials):
    """Runs the script with records in a temporary folder, which is removed at the end."""

    asked: RunRequest

    def __init__(self, asked: RunRequest, say: Callable[[str], None]) -> None:
        super().__init__(asked, say, "paceline-diagnose-")
        self.deadline = asked.deadline or self.deadline
        self.runs = 0
        self.threads: list[str] = []

    def use_threads_of(self, run: Run) -> None:
        """Let a single rank compute with as many threads as each rank of this run."""
        counts = {int(r.meta["threads"]) for r in run.records if "threads" in r.meta}
        if counts and "--threads" not in self.asked.options:
            self.threads = ["--threads", str(min(counts))]

    def run(
        self,
        alone: bool,
        rung: Rung,
        count: bool = False,
        settings: dict[str, Any] | None = None,
        named: str = "",
        limit_s: float = math.inf,
    ) -> Run:
        """Run the script once and return its record.

        Args:
            alone: Run a single rank instead of all ranks.
            rung: Phases of the run.
            count: Count the FLOPs of a step.
            settings: Knobs that are set in this run, in addition to the requested ones.
            named: Description of the run for the user, instead of the default one.
            limit_s: Maximum duration, if less time than until the deadline is meant.

        Raises:
            FailedError: The script failed.
            OutOfTimeError: The run was ended after ``limit_s`` or at the deadline.
            InterruptedTrialError: The user interrupted the run.
            ValueError: The script was stopped.
        """
        if not self.deadline.left_s:
            raise OutOfTimeError(self.asked.minutes)
        self.runs += 1
        who = "one rank" if alone else "all ranks"
        what = named or f"{counted(rung.steps, 'step')} of each: {', '.join(rung.phases)}"
        self.say(f"run {self.runs}: {who}, {what}")
        spec = TrialSpec(
            self.folder / f"{self.runs}",
            self.folder / f"{self.runs}.log",
            self._options(rung, count),
            ranks=1 if alone else None,
            where=on_first_host(self.asked.where, 1) if alone else None,
            settings={**self.asked.settings, **(settings or {})},
            limit_s=limit_s,
        )
        trial = self.run_trial(spec)
        if trial.code is None:
            raise OutOfTimeError(self.asked.minutes, trial.load_partial())
        run = trial.load()
        if stopped := trial.stopped(run):
            raise ValueError(stopped)
        failure = trial.failure(run, who)
        if failure is not None:
            raise FailedError(failure.text, failure.steps, failure.short)
        assert run is not None, "a trial without a record has failed"
        return run

    def _options(self, rung: Rung, count: bool) -> list[str]:
        """Return the options of a run."""
        scratch = self.folder / f"scratch-{self.runs}"
        rung = replace(rung, scratch=str(scratch), covered=self.covered)
        words = [*self.threads, "--env", f"{RUNG_VARIABLE}={rung.to_json()}"]
        return words + ["--count-flops"] * count
