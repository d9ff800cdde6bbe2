"""One run from the checkpoint with a multiple of the batch."""

import math
from dataclasses import dataclass
from pathlib import Path

from ....analyze.figures.noise_scale import recorded_steps
from ....analyze.figures.report import analyse_with_window
from ....analyze.records.data_axis import find_data_axis
from ....analyze.records.load_run import Run
from ....analyze.reference.metric import BACKWARD
from ....analyze.reference.reference_file import RECORD_FILE, read_reference
from ....analyze.scaling.critical.critical_model import BranchRun, CriticalRequest
from ....analyze.scaling.critical.judgement import TAIL_SHARE
from ....analyze.scaling.runs.figures_of_run import figures_of_run, recorded_batch
from ....analyze.scaling.study_folder import LOG_FILE, RECORD_FOLDER
from ....analyze.scaling.study_model import RunFigures, Setup
from ....knobs.learning_rate import NAME as RATE_KNOB
from ....knobs.learning_rate import UsedOptimizer, used_optimizers
from ....knobs.loading.batch import ACCUMULATE
from ....knobs.loading.batch import NAME as BATCH_KNOB
from ....plurals import counted
from ....record.experiments.protected_run import STEP_LIMIT_VARIABLE, StepLimit
from ....record.ring.states import State
from ....record.watch.seed_shift import VARIABLE as SEED_SHIFT
from ...trials import InterruptedTrialError, Trial, Trials, TrialSpec
from ..plan import SEED, filled_in, uses_template
from ..run_folders import SCRATCH_FOLDER, new_run_folder, remove_run, remove_scratch
from ..run_setup import NO_BATCH_HINT, NO_SAMPLES, is_near

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
        name = Setup(self.request.ranks, branch.batch or 1)
        path, _ = new_run_folder(self.folder, name, f"x{branch.multiple}-")
        try:
            trial = self.trials.run_trial(self._spec(branch, path))
            remove_scratch(path)
            return self._outcome(branch, trial)
        except InterruptedTrialError:
            remove_scratch(path)
            raise
        finally:
            remove_run(path)

    def _spec(self, branch: Branch, path: Path) -> TrialSpec:
        request = self.request
        covered, scratch = self.trials.covered, str(path / SCRATCH_FOLDER)
        limit = StepLimit(branch.steps, scratch, covered, branches=True)
        options = ["--env", f"{STEP_LIMIT_VARIABLE}={limit.to_json()}"]
        options += ["--env", "PACELINE_PROGRESS=0", "--metric", request.metric or BACKWARD]
        if not any(SEED in word for word in request.args):
            options += ["--env", f"{SEED_SHIFT}={branch.seed}"]
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
            record = trial.load()
        except (ValueError, OSError) as error:
            return _failed(run, f"the record can't be read: {error}")
        if stopped := trial.stopped(record):
            return _failed(run, stopped)
        if trial.code is None:
            is_over = not self.trials.deadline.left_s
            return _failed(run, f"it took longer than {branch.limit_s:.0f} s", early=is_over)
        failure = trial.failure(record, counted(self.request.ranks, "rank"))
        if failure is not None:
            return _failed(run, failure.short, failure.text)
        assert record is not None, "a trial without a record has failed"
        return self._measured(branch, run, record, trial)

    def _measured(self, branch: Branch, run: BranchRun, record: Run, trial: Trial) -> BranchOutcome:
        """Return the outcome of a run that ended without a failure."""
        first, optimizers = _first_step(record), _optimizers(record)
        if first is None:
            return _failed(
                run,
                "it made no step: the training is complete in its checkpoint. HINT: more epochs in "
                "ARGS, or an earlier checkpoint",
            )
        try:
            figures = figures_of_run(record)
            samples, losses = self._losses(branch, trial, figures, first)
        except ValueError as error:
            return _failed(run, str(error))
        if why := self._wrong_batch(branch, record, figures):
            return _failed(run, why)
        noise = [(small, big, one, whole) for small, big, one, whole in _noise_rows(record)]
        run = BranchRun(
            *(run.multiple, run.seed, run.parts, samples, losses, noise),
            took_s=run.took_s,
        )
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
        samples = [max(float(one), 1.0) for one in counts]
        if samples[-1] <= (1 - TAIL_SHARE) * branch.steps * usual:
            raise ValueError(
                f"the last of {counted(len(samples), 'value')} of the loss is of step "
                f"{samples[-1] / usual:.0f} of {branch.steps}. HINT: --metric with a value of "
                "every step, a larger --steps, or more epochs in ARGS"
            )
        losses = [float(one) if math.isfinite(one) else None for one in series.values]
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
    failed = BranchRun(
        *(run.multiple, run.seed, run.parts),
        failure=short,
        diverged=diverged,
        took_s=run.took_s,
    )
    return BranchOutcome(failed, text=text or short, is_ended_early=early)


def _first_step(record: Run) -> int | None:
    """Return how many steps a run had made before; None if it made none."""
    steps = [one.events_in(State.STEP)["step"] for one in record.records]
    return min((int(of.min()) for of in steps if len(of)), default=None)


def _optimizers(record: Run) -> tuple[UsedOptimizer, ...]:
    told = [one.meta.get("knobs", {}).get(RATE_KNOB, {}).get("how", "") for one in record.records]
    return tuple(used_optimizers(max(told, key=len, default="")))


def _noise_rows(record: Run) -> list[list[float]]:
    measured = analyse_with_window(record).measured
    if measured is None:
        return []
    shards = find_data_axis(record.records, measured.within).shards
    rows: list[list[float]] = recorded_steps(record.records, shards).tolist()
    return rows
