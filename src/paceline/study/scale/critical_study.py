"""The runs of a measurement of the critical batch, one after the other."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...analyze.figures.noise_scale import recorded_steps
from ...analyze.figures.report import analyse_with_window
from ...analyze.records.data_axis import find_data_axis
from ...analyze.records.load_run import Run
from ...analyze.reference.metric import BACKWARD
from ...analyze.reference.reference_file import RECORD_FILE, read_reference
from ...analyze.scaling.critical.critical_model import (
    FILE,
    LINEAR,
    SQUARE_ROOT,
    BranchPoint,
    BranchRun,
    CriticalRequest,
    StoredCritical,
    read_critical,
    write_critical,
)
from ...analyze.scaling.critical.judgement import MIN_TAIL_STEPS, TAIL_SHARE, end_loss
from ...analyze.scaling.figures_of_run import figures_of_run, recorded_batch
from ...analyze.scaling.study_folder import LOG_FILE, RECORD_FOLDER, RUNS_FOLDER
from ...analyze.scaling.study_model import RunFigures, Setup
from ...knobs.learning_rate import NAME as RATE_KNOB
from ...knobs.learning_rate import UsedOptimizer, used_optimizers
from ...knobs.loading import ACCUMULATE
from ...knobs.loading import BATCH as BATCH_KNOB
from ...plurals import counted
from ...record.ring.states import State
from ..study_folder import (
    SCRATCH_FOLDER,
    create_folder,
    locked_sizes,
    new_run_folder,
    remove_run,
    remove_scratch,
)
from ..trials import (
    NoResultError,
    ScriptRequest,
    Trial,
    Trials,
    TrialSpec,
    seed_options,
    step_limit_options,
)
from .plan import (
    DEFAULT_MINUTES,
    FIRST_STEPS,
    USED_SHARE,
    filled_in,
    run_limit_s,
    uses_template,
)
from .run_setup import NO_BATCH_HINT, NO_SAMPLES, is_near

MOST_STEPS = 2000  # of the base


# One run from the checkpoint with a multiple of the batch.

OUT_OF_MEMORY = ("out of memory", "outofmemory", "can't allocate memory")
NOT_FINITE = ("is not finite", "not finite", "is nan", "is inf")


@dataclass(frozen=True)
class Branch:
    """What one run does.

    Attributes:
        multiple, seed, parts: As in ``BranchRun``.
        batch: Samples of a step of all ranks; None: that of the script.
        batches: Batches of a step without ``parts``.
        factor: Factor of the learning rate.
        steps: Steps after which it ends.
        limit_s: Duration after which it counts as failed.
    """

    multiple: int
    seed: int
    batch: int | None
    factor: float
    steps: int
    batches: int = 1
    parts: int = 1
    limit_s: float = math.inf


@dataclass(frozen=True)
class BranchOutcome:
    """How a run ended.

    Attributes:
        run: As it is stored.
        figures: None if it failed.
        first_step: Steps before its first one.
        optimizers: Those that have stepped.
        text: The failure with the last lines of the output.
        is_ended_early: Whether the time of the measurement was over.
    """

    run: BranchRun
    figures: RunFigures | None = None
    first_step: int = 0
    optimizers: tuple[UsedOptimizer, ...] = ()
    text: str = ""
    is_ended_early: bool = False

    @property
    def lacks_memory(self) -> bool:
        return any(word in self.text.lower() for word in OUT_OF_MEMORY)


class BranchRunner:
    """Runs branches in the study's folder; their records are removed when they were read."""

    def __init__(self, folder: Path, request: CriticalRequest, trials: Trials) -> None:
        self.folder, self.request, self.trials = folder, request, trials

    def run(self, branch: Branch) -> BranchOutcome:
        """Run one branch.

        Raises:
            InterruptedTrialError: The user interrupted it.
            OSError: The folder can't be written.
        """
        setup = Setup(self.request.ranks, branch.batch or 1)
        path, _ = new_run_folder(self.folder, setup, f"x{branch.multiple}-")
        try:
            return self._outcome(branch, self.trials.run_trial(self._spec(branch, path)))
        finally:
            remove_scratch(path)
            remove_run(path)

    def _spec(self, branch: Branch, path: Path) -> TrialSpec:
        request = self.request
        options = step_limit_options(
            self.trials, branch.steps, path / SCRATCH_FOLDER, branches=True
        )
        options += ["--env", "PACELINE_PROGRESS=0", "--metric", request.metric or BACKWARD]
        options += seed_options(request.args, branch.seed)
        settings = dict(request.settings) | {RATE_KNOB: branch.factor}
        args = request.args
        if branch.batch is not None:
            loaded = branch.batch // (branch.batches * branch.parts)
            args = filled_in(args, Setup(request.ranks, loaded), branch.seed)
            if not uses_template(request.args):
                settings[BATCH_KNOB] = loaded
        if branch.parts > 1:
            settings[ACCUMULATE] = branch.parts
        return TrialSpec(
            path / RECORD_FOLDER,
            path / LOG_FILE,
            options,
            ranks=request.ranks,
            args=args,
            settings=settings,
            limit_s=branch.limit_s,
        )

    def _outcome(self, branch: Branch, trial: Trial) -> BranchOutcome:
        run = BranchRun(branch.multiple, branch.seed, branch.parts, took_s=trial.took_s)
        try:
            record = trial.finished_record(counted(self.request.ranks, "rank"))
            return self._measured(branch, run, record, trial)
        except NoResultError as failure:
            early = trial.code is None and not self.trials.deadline.left_s
            return _failed(run, str(failure), failure.text, early=early)
        except ValueError as error:
            return _failed(run, str(error))

    def _measured(self, branch: Branch, run: BranchRun, record: Run, trial: Trial) -> BranchOutcome:
        """Return the outcome of a run that ended. Raises ValueError if it has no result."""
        first, optimizers = _first_step(record), _optimizers(record)
        if first is None:
            raise NoResultError(
                "it made no step: the training is complete in its checkpoint. HINT: more epochs in "
                "ARGS, or an earlier checkpoint"
            )
        figures = figures_of_run(record)
        samples, losses = self._losses(branch, trial, figures, first)
        if why := self._wrong_batch(branch, record, figures):
            raise NoResultError(why)
        run = replace(run, samples=samples, losses=losses, noise=_noise_rows(record))
        return BranchOutcome(run, figures, first, optimizers)

    def _losses(
        self, branch: Branch, trial: Trial, figures: RunFigures, first: int
    ) -> tuple[list[float], list[float | None]]:
        """Return samples since the checkpoint, and losses, of each step. Raises ValueError."""
        folder = trial.spec.record
        assert folder is not None, "every branch is recorded"
        name = self.request.metric
        unseen = (
            f"no value of --metric {name} was seen" if name else "no loss was seen in a backward"
        ) + (
            ". HINT: --metric NAME for a value of world.log, or --metric REGEX for lines of the "
            "output"
        )
        if not (folder / RECORD_FILE).exists():
            raise ValueError(unseen)
        series = read_reference(folder).runs[0]
        if not len(series):
            raise ValueError(unseen)
        usual = figures.usual_samples
        # a resumed run counts the steps before as steps of its own batch
        counts = (
            series.samples - first * usual
            if series.has_samples
            else ((series.steps - first) * usual)
        )
        samples = [max(float(samples_seen), 1.0) for samples_seen in counts]
        if samples[-1] <= (1 - TAIL_SHARE) * branch.steps * usual:
            raise ValueError(
                f"the last of {counted(len(samples), 'value')} of the loss is of step "
                f"{samples[-1] / usual:.0f} of {branch.steps}. HINT: --metric with a value of "
                "every step, a larger --steps, or more epochs in ARGS"
            )
        losses = [float(loss) if math.isfinite(loss) else None for loss in series.values]
        return samples, losses

    def _wrong_batch(self, branch: Branch, record: Run, figures: RunFigures) -> str:
        """Return why the run did not train the batch that it was given, or ""."""
        found = figures.usual_samples
        if not found:
            return NO_SAMPLES
        if branch.batch is None:
            return ""
        if not uses_template(self.request.args):
            _, why = recorded_batch(record)
            if why:
                return f"the batch can't be set: {why}. {NO_BATCH_HINT}"
        if is_near(found, branch.batch):
            return ""
        ways = "in accumulated parts " if branch.parts > 1 else ""
        return (
            f"the script trains {found:g} samples a step instead of {branch.batch}: it does not "
            f"use the batch that it was given {ways}(or has too few samples). {NO_BATCH_HINT}"
        )


def _failed(run: BranchRun, short: str, text: str = "", early: bool = False) -> BranchOutcome:
    diverged = any(word in (text or short).lower() for word in NOT_FINITE)
    failed = replace(run, failure=short, diverged=diverged)
    return BranchOutcome(failed, text=text or short, is_ended_early=early)


def _first_step(record: Run) -> int | None:
    """Return how many steps a run had made before; None if it made none."""
    steps = [rank.events_in(State.STEP)["step"] for rank in record.records]
    return min((int(of.min()) for of in steps if len(of)), default=None)


def _optimizers(record: Run) -> tuple[UsedOptimizer, ...]:
    knobs = [rank.meta.get("knobs", {}) for rank in record.records]
    texts = [of_rank.get(RATE_KNOB, {}).get("how", "") for of_rank in knobs]
    return tuple(used_optimizers(max(texts, key=len, default="")))


def _noise_rows(record: Run) -> list[tuple[float, float, float, float]]:
    measured = analyse_with_window(record).measured
    if measured is None:
        return []
    shards = find_data_axis(record.records, measured.within).shards
    return [tuple(row) for row in recorded_steps(record.records, shards).tolist()]


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
    create_folder(folder, FILE)
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
    with locked_sizes(folder, say):
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
            return _Measurement(folder, stored, BranchRunner(folder, request, trials), say).run()


class _Measurement:
    """The loop over the runs."""

    def __init__(
        self, folder: Path, stored: StoredCritical, runner: BranchRunner, say: Callable[[str], None]
    ) -> None:
        self.folder, self.stored, self.runner, self.say = folder, stored, runner, say
        self.request, self.deadline = stored.request, runner.trials.deadline
        self._parts = {run.multiple: run.parts for run in stored.runs}
        self._done = 0

    def run(self) -> CriticalEnd:
        interrupted = False
        try:
            point = self.stored.point or self._first_run()
            for multiple, seed in self._missing():
                if not self._run(point, multiple, seed):
                    break
        except KeyboardInterrupt:
            interrupted = True
        return CriticalEnd(self.stored, interrupted)

    def _store(self, stored: StoredCritical) -> None:
        self.stored = stored
        write_critical(self.folder, stored)

    def _missing(self) -> Iterator[tuple[int, int]]:
        """Yield multiple and seed of each run to make; a multiple that failed is left out."""
        for seed in range(self.request.seeds):
            for multiple in self.request.multiples:
                runs = self.stored.of(multiple)
                if not any(run.seed == seed or (run.failure and not run.diverged) for run in runs):
                    yield multiple, seed

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
        if not outcome.first_step and not any(
            optimizer.is_restored for optimizer in outcome.optimizers
        ):
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
            [optimizer.kind for optimizer in outcome.optimizers],
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
        rules = {
            SQUARE_ROOT if optimizer.is_adaptive else LINEAR for optimizer in outcome.optimizers
        }
        if len(rules) == 1:
            return rules.pop()
        kinds = ", ".join(optimizer.kind for optimizer in outcome.optimizers) or "none was seen"
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
        common = math.lcm(*request.multiples)
        return min(steps, MOST_STEPS) // common * common

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
            run_limit_s(expected_s),
        )

    def _expected_s(self, point: BranchPoint) -> float:
        known = [run.took_s for run in self.stored.runs if run.losses]
        return statistics.median(known) if known else point.start_s + point.steps * point.step_s

    def _tell(self, outcome: BranchOutcome) -> None:
        run, wanted = outcome.run, self.request.seeds * len(self.request.multiples)
        result = f"failed: {run.failure}"
        if run.losses and self.stored.point is not None:
            result = f"loss {end_loss(run, self.stored.point.window):.4g}"
        missing = len(list(self._missing()))
        self.say(
            f"run {len(self.stored.runs)} of {wanted}: {run.multiple} times the batch, seed "
            f"{run.seed}: {result} ({run.took_s:.0f} s)"
            + (f", about {missing * run.took_s:.0f} s left" if missing else "")
        )
