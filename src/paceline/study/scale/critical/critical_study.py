"""The runs of a measurement of the critical batch, one after the other."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ....analyze.scaling.critical.critical_model import (
    FILE,
    LINEAR,
    SQUARE_ROOT,
    BranchPoint,
    CriticalRequest,
    StoredCritical,
    read_critical,
    write_critical,
)
from ....analyze.scaling.critical.judgement import MIN_TAIL_STEPS, TAIL_SHARE, end_loss
from ....analyze.scaling.study_folder import RUNS_FOLDER
from ....plurals import counted
from ...trials import ScriptRequest, Trials
from ..plan import FIRST_STEPS, USED_SHARE, uses_template
from ..run_folders import remove_run
from ..study_lock import locked_study
from .branch_runs import Branch, BranchOutcome, BranchRunner

DEFAULT_MINUTES = 10.0
MOST_STEPS = 2000  # of the base
RUN_LIMIT_FACTOR, MIN_RUN_LIMIT_S = 6.0, 120.0  # of the expected time of a run


def new_critical(folder: Path, request: CriticalRequest) -> None:
    """Create the folder of a measurement.

    Raises:
        ValueError: It exists and is not empty, or the request can't be measured.
        OSError: It can't be created.
    """
    if uses_template(request.args) and request.global_batch is None:
        raise ValueError(
            "the script's arguments contain the batch, and the batch is not given. HINT: "
            "--global-batch N, the batch of all ranks in a step"
        )
    least = least_steps(request)
    if request.steps is not None and request.steps < least:
        raise ValueError(
            f"--steps {request.steps}: a run with {request.multiples[-1]} times the batch would "
            f"have too few steps to compare. HINT: --steps {least}, or smaller --multiples"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        is_study = (folder / FILE).exists()
        hint = f"paceline scale --continue {folder}" if is_study else "name a new folder"
        raise ValueError(f"--output {folder} exists and is not empty. HINT: {hint}")
    folder.mkdir(parents=True, exist_ok=True)
    write_critical(folder, StoredCritical.new(request))


def least_steps(request: CriticalRequest) -> int:
    """Return the fewest steps of the base, of which the largest batch has enough at the end."""
    least = math.ceil(MIN_TAIL_STEPS / TAIL_SHARE) * request.multiples[-1]
    return _whole(least, request)


def _whole(steps: int, request: CriticalRequest) -> int:
    """Return the next number of steps that all multiples divide."""
    common = math.lcm(*request.multiples)
    return -(-steps // common) * common


@dataclass(frozen=True)
class CriticalEnd:
    """How a measurement ended.

    Attributes:
        stored: All that was measured.
        interrupted: Whether the user interrupted it.
    """

    stored: StoredCritical
    interrupted: bool = False


def run_critical(folder: Path, say: Callable[[str], None], minutes: float | None) -> CriticalEnd:
    """Run what is missing of a measurement.

    Args:
        folder: Its folder.
        say: Receives what happens.
        minutes: Time budget, instead of that of the request.

    Raises:
        ValueError: The script can't be measured, or another process measures in this folder.
        OSError: The folder can't be written.
    """
    folder = folder.absolute()
    with locked_study(folder, say):
        stored = read_critical(folder)
        request = stored.request
        for left in (folder / RUNS_FOLDER).glob("x*-n*"):  # of a process that was killed
            remove_run(left)
        asked = ScriptRequest(
            request.script,
            request.args,
            request.where,
            request.options,
            request.ranks,
            minutes or request.minutes or DEFAULT_MINUTES,
        )
        with (
            contextlib.chdir(request.cwd),
            Trials(asked, say, "paceline-critical-", folder) as trials,
        ):
            return _Measurement(folder, stored, BranchRunner(folder, request, trials), say).all()


class _Measurement:
    """The loop over the runs."""

    def __init__(
        self,
        folder: Path,
        stored: StoredCritical,
        runner: BranchRunner,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.stored, self.runner, self.say = folder, stored, runner, say
        self.request, self.deadline = stored.request, runner.trials.deadline
        self._parts = {run.multiple: run.parts for run in stored.runs}
        self._done = 0

    def all(self) -> CriticalEnd:
        interrupted = False
        try:
            point = self.stored.point or self._first_run()
            for seed in range(self.request.seeds):
                for multiple in self.request.multiples:
                    if self._is_missing(multiple, seed) and not self._run(point, multiple, seed):
                        return CriticalEnd(self.stored)
        except KeyboardInterrupt:
            interrupted = True
        return CriticalEnd(self.stored, interrupted)

    def _store(self, stored: StoredCritical) -> None:
        self.stored = stored
        write_critical(self.folder, stored)

    def _is_missing(self, multiple: int, seed: int) -> bool:
        """Return whether a run is to be made; a multiple that failed is not tried again."""
        runs = self.stored.of(multiple)
        return not any(run.seed == seed or (run.failure and not run.diverged) for run in runs)

    # The first run

    def _first_run(self) -> BranchPoint:
        """Run the base for a few steps, to see where it resumes, its batch and its optimizers.

        Raises:
            ValueError: It can't be measured.
        """
        self.say(
            f"first run: {counted(self.request.ranks, 'rank')}, {FIRST_STEPS} steps, to see the "
            "checkpoint, the batch and the optimizer"
        )
        before = time.monotonic()
        outcome = self.runner.run(Branch(1, 0, self.request.global_batch, 1.0, FIRST_STEPS))
        took_s = time.monotonic() - before
        figures = outcome.figures
        if figures is None:
            raise ValueError(f"the measurement can't begin: {outcome.text}")
        if not outcome.first_step and not any(one.is_restored for one in outcome.optimizers):
            raise ValueError(
                "the script does not resume: its first step is step 1, and it loads no saved state "
                "into an optimizer. HINT: train it until it has saved a checkpoint "
                "(world.epochs(..., checkpoint=DIR)), or add its option for resuming to ARGS"
            )
        step_s = statistics.median(figures.step_s)
        start_s = max(took_s - FIRST_STEPS * step_s, 0.1)
        point = BranchPoint(
            outcome.first_step,
            round(figures.usual_samples),
            figures.batches_per_step,
            [one.kind for one in outcome.optimizers],
            self._rule(outcome),
            self._steps(start_s, step_s),
            start_s,
            step_s,
        )
        self._check_division(point)
        self._store(replace(self.stored, point=point))
        self.say(
            f"branches at step {point.step}: batch {point.batch}, learning rate by rule "
            f"{point.rule} ({', '.join(point.optimizers)}), {point.window:,} samples in "
            "each run"
        )
        return point

    def _rule(self, outcome: BranchOutcome) -> str:
        """Return the rule for the learning rate: as asked, or as the optimizers need."""
        if self.request.rule:
            return self.request.rule
        rules = {SQUARE_ROOT if one.is_adaptive else LINEAR for one in outcome.optimizers}
        if len(rules) == 1:
            return rules.pop()
        kinds = ", ".join(one.kind for one in outcome.optimizers) or "none was seen"
        raise ValueError(
            f"the optimizers need different rules for the learning rate, or are not known ({kinds})"
            ". HINT: --rule linear, or --rule sqrt"
        )

    def _check_division(self, point: BranchPoint) -> None:
        each = point.batches * self.request.ranks
        if point.batch % each:
            raise ValueError(
                f"a batch of {point.batch} samples in {counted(point.batches, 'batch', 'batches')} "
                f"a step can't be divided by {counted(self.request.ranks, 'rank')}. HINT: "
                f"--global-batch {max(round(point.batch / each), 1) * each}"
            )

    def _steps(self, start_s: float, step_s: float) -> int:
        """Return the steps of a run of the base: as asked, or from the time that is left.

        Raises:
            ValueError: The time is too short.
        """
        request = self.request
        if request.steps is not None:
            return _whole(request.steps, request)
        runs, least = request.seeds * len(request.multiples), least_steps(request)
        each_s = USED_SHARE * self.deadline.left_s / runs - start_s
        steps = int(each_s / max(step_s, 1e-9))
        if steps < least:
            minutes = math.ceil(10 * runs * (start_s + least * step_s) / USED_SHARE / 60) / 10
            raise ValueError(
                f"the time is too short: {runs} runs of at least {least} steps take about "
                f"{minutes:g} min. HINT: --minutes {minutes + 0.5:g}, or smaller --multiples or "
                "--seeds"
            )
        return min(steps, MOST_STEPS) // math.lcm(*request.multiples) * math.lcm(*request.multiples)

    # The other runs

    def _run(self, point: BranchPoint, multiple: int, seed: int) -> bool:
        """Make one run and store it; return whether there was time for it."""
        expected_s = self._expected_s(point)
        if self._done and expected_s > self.deadline.left_s:
            self.say("the time is over. HINT: paceline scale --continue DIR --minutes N")
            return False
        while True:
            parts = self._parts.get(multiple, 1)
            outcome = self.runner.run(self._branch(point, multiple, seed, parts, expected_s))
            if outcome.is_ended_early:
                self.say("the time is over. HINT: paceline scale --continue DIR --minutes N")
                return False
            if not (outcome.lacks_memory and multiple > 1 and parts < multiple):
                break
            larger = (n for n in range(2 * parts, multiple + 1) if multiple % n == 0)
            self._parts[multiple] = next(larger, multiple)
            self.say(
                f"{multiple} times the batch does not fit into memory: it is split into "
                f"{self._parts[multiple]} batches whose gradients are accumulated"
            )
        self._done += 1
        self._store(replace(self.stored, runs=[*self.stored.runs, outcome.run]))
        self._tell(outcome)
        if multiple == 1 and outcome.run.failure:
            raise ValueError(f"the script's own batch failed: {outcome.text}")
        return True

    def _branch(
        self, point: BranchPoint, multiple: int, seed: int, parts: int, expected_s: float
    ) -> Branch:
        return Branch(
            multiple,
            seed,
            multiple * point.batch,
            point.rate_factor(multiple),
            point.steps // multiple,
            point.batches,
            parts,
            max(MIN_RUN_LIMIT_S, RUN_LIMIT_FACTOR * expected_s),
        )

    def _expected_s(self, point: BranchPoint) -> float:
        known = [run.took_s for run in self.stored.runs if run.losses]
        return statistics.median(known) if known else point.start_s + point.steps * point.step_s

    def _tell(self, outcome: BranchOutcome) -> None:
        run, wanted = outcome.run, self.request.seeds * len(self.request.multiples)
        result = f"failed: {run.failure}"
        if run.losses and self.stored.point is not None:
            result = f"loss {end_loss(run, self.stored.point.window):.4g}"
        missing = [
            (multiple, seed)
            for seed in range(self.request.seeds)
            for multiple in self.request.multiples
            if self._is_missing(multiple, seed)
        ]
        left_s = len(missing) * run.took_s
        self.say(
            f"run {len(self.stored.runs)} of {wanted}: {run.multiple} times the batch, seed "
            f"{run.seed}: {result} ({run.took_s:.0f} s)"
            + (f", about {left_s:.0f} s left" if missing else "")
        )
