"""One run of a scaling study: a setup of ranks and batch, from the trial to its figures on disk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...analyze.records.load_run import Run
from ...analyze.scaling.runs.figures_of_run import TooShortError, figures_of_run, recorded_batch
from ...analyze.scaling.study_folder import LOG_FILE, RECORD_FOLDER, RUNS_FOLDER, write_run
from ...analyze.scaling.study_model import (
    KNOB,
    SHARD,
    TEMPLATE,
    MachineState,
    RunFigures,
    Setup,
    StudyRequest,
    StudyRun,
    TargetResult,
    layout_over,
)
from ...cluster.energy.meter import EnergyMeter
from ...knobs.layouts.requested import NAME as LAYOUT_KNOB
from ...knobs.loading.batch import NAME as BATCH_KNOB
from ...plurals import counted
from ...record.experiments.protected_run import STEP_LIMIT_VARIABLE, StepLimit
from ..trials import InterruptedTrialError, Trial, Trials, TrialSpec
from .energy import measured_energy
from .machine_watch import MachineWatch
from .places import Place
from .plan import SEED, filled_in, uses_template
from .run_folders import FIRST, SCRATCH_FOLDER, new_run_folder, remove_run, remove_scratch
from .target_runs import target_options, target_result

BATCH_TOLERANCE = 0.01  # relative difference of the recorded samples of a step
NO_BATCH_HINT = (
    "HINT: put the batch into the script's arguments: --batch-size {per_rank}, or {global} for the "
    "batch of all ranks"
)

NO_SAMPLES = (
    "the record has no samples, so the batch can't be checked. HINT: read the batches of the "
    "training from a DataLoader, or with world.batches"
)


class TimeOverError(Exception):
    """A run was ended because the time of the study was over."""


@dataclass(frozen=True)
class RunPlan:
    """What one run does.

    Attributes:
        steps: Steps after which it ends; 0: at the target, or where the script ends.
        sets_batch: Whether the global batch of the setup is set; else the script's own is used.
        finds_parts: Whether the run may show that a step trains several of the batches that are
            set (``SetupRunner.parts``).
        limit_s: Duration after which it counts as failed.
    """

    steps: int
    sets_batch: bool = True
    finds_parts: bool = False
    limit_s: float = math.inf


@dataclass(frozen=True)
class SetupResult:
    """A run that ended, and what the study learns from it.

    Attributes:
        run: As stored; without ``figures`` it failed.
        text: The failure with the last lines of the output, if it failed.
    """

    run: StudyRun
    text: str = ""


@dataclass(frozen=True)
class _Begun:
    """A run whose folder exists. first_host: Index of its first host."""

    setup: Setup
    plan: RunPlan
    path: Path
    repeat: int
    first_host: int


class SetupRunner:
    """Runs the setups of a study in its folder.

    Args:
        folder: The study's folder.
        request: The study's request.
        place: Where the sizes run.
        trials: Runs the script.

    Attributes:
        parts: Parts of the global batch. A script that accumulates gradients trains several
            batches a step; each is one part, which is set in the runs.
    """

    def __init__(self, folder: Path, request: StudyRequest, place: Place, trials: Trials) -> None:
        self.folder, self.request, self.place, self.trials = folder, request, place, trials
        self.parts = 1

    def run(self, setups: Sequence[Setup], plan: RunPlan) -> list[SetupResult]:
        """Run setups once, and store their figures or failures.

        Several run at the same time, each on hosts of its own.

        Raises:
            TimeOverError: The time of the study was over. The runs that had not ended are removed.
            InterruptedTrialError: The user interrupted the runs, which are removed.
            OSError: The folder can't be written.
        """
        begun, first_host = [], 0
        for setup in setups:
            path, repeat = new_run_folder(self.folder, setup)
            begun.append(_Begun(setup, plan, path, repeat, first_host))
            first_host += self.place.hosts_of(setup.ranks)
        results = self._run(begun)
        for result in results:
            write_run(self.folder, result.run)
        if len(results) < len(begun):
            raise TimeOverError
        return results

    def first_run(self, setup: Setup, plan: RunPlan) -> SetupResult:
        """Run a setup once without storing it. Raises as ``run``."""
        path, _ = new_run_folder(self.folder, setup, FIRST)
        try:
            results = self._run([_Begun(setup, plan, path, 0, 0)])
        finally:
            remove_run(path)
        if not results:
            raise TimeOverError
        return results[0]

    def _run(self, begun: "Sequence[_Begun]") -> list[SetupResult]:
        """Return the results of runs that ended before the time of the study was over."""
        watch, meter = MachineWatch(self.place.by_daemon), EnergyMeter().start()
        watch.start()
        try:
            trials = self.trials.run_trials([self._spec(one) for one in begun])
        except InterruptedTrialError:
            for one in begun:
                remove_run(one.path)
            raise
        finally:
            machine = watch.stop()
            meter.stop()
            for one in begun:
                remove_scratch(one.path)
        results = []
        for one, trial in zip(begun, trials, strict=True):
            if trial.code is None and not self.trials.deadline.left_s and one.plan.steps:
                remove_run(one.path)
            else:
                results.append(self._result(one, trial, machine, meter))
        return results

    def _spec(self, one: "_Begun") -> TrialSpec:
        request, setup, plan, folder = self.request, one.setup, one.plan, one.path
        covered, scratch = self.trials.covered, folder / SCRATCH_FOLDER
        limit = StepLimit(plan.steps, str(scratch), covered)
        options = ["--env", f"{STEP_LIMIT_VARIABLE}={limit.to_json()}"]
        options += [] if plan.steps else target_options(request, one.repeat)
        settings = dict(request.settings)
        settings |= {LAYOUT_KNOB: setup.layout} if setup.layout else {}
        if plan.sets_batch and not uses_template(request.args):
            settings[BATCH_KNOB] = setup.global_batch // self.parts
        return TrialSpec(
            folder / RECORD_FOLDER,
            folder / LOG_FILE,
            options,
            ranks=setup.ranks,
            where=self.place.where(setup.ranks, one.first_host),
            args=filled_in(request.args, setup, one.repeat, self.parts),
            settings=settings,
            limit_s=plan.limit_s,
        )

    def _result(
        self, one: "_Begun", trial: Trial, machine: MachineState, meter: EnergyMeter
    ) -> SetupResult:
        """Return the result of a trial that ended."""
        plan, hosts = one.plan, self.place.hosts_of(one.setup.ranks)
        name = f"{RUNS_FOLDER}/{one.path.name}"
        run = StudyRun(name, one.setup, one.repeat, hosts=hosts)
        run = replace(run, took_s=trial.took_s, started=trial.started)
        who = counted(run.setup.ranks, "rank")
        try:
            record = trial.load()
        except (ValueError, OSError) as error:
            return SetupResult(replace(run, failure=f"the record can't be read: {error}"))
        if stopped := trial.stopped(record):
            return SetupResult(replace(run, failure=stopped))
        if trial.code is None and plan.steps:
            return SetupResult(replace(run, failure=f"it took longer than {plan.limit_s:.0f} s"))
        failure = trial.failure(record, who)
        if failure is not None and (trial.code is not None or record is None):
            return SetupResult(replace(run, failure=failure.short), text=failure.text)
        assert record is not None, "a trial without a record has failed"
        try:
            figures = figures_of_run(record)
            end = None if plan.steps else self._end(trial, record, run.setup)
        except (TooShortError, ValueError) as error:
            return SetupResult(replace(run, failure=str(error)))
        has_seed = end is not None or any(SEED in word for word in self.request.args)
        seed = run.repeat if has_seed else None
        figures = replace(figures, machine=machine, seed=seed, wall_s=trial.took_s, to_target=end)
        energy, notes = measured_energy(meter, record, figures, one.first_host + run.hosts)
        figures = replace(figures, energy=energy, energy_notes=notes)
        if why := _other_layout(run.setup, figures):
            return SetupResult(replace(run, failure=why))
        parts = self._parts(run.setup, plan, figures)
        how, why = self._check_batch(run.setup, plan, record, figures, parts)
        if why:
            return SetupResult(replace(run, failure=why))
        return SetupResult(replace(run, figures=figures, batch_how=how, batch_parts=parts))

    def _end(self, trial: Trial, record: Run, setup: Setup) -> TargetResult | None:
        """Return how a run to the target ended."""
        assert trial.spec.record is not None, "every run of a study is recorded"
        return target_result(self.request, trial.spec.record, record, setup)

    def _parts(self, setup: Setup, plan: RunPlan, figures: RunFigures) -> int:
        """Return the parts of the global batch that a run has shown."""
        batches = figures.batches_per_step
        if not plan.sets_batch:
            return batches if round(figures.usual_samples) % batches == 0 else 1
        if plan.finds_parts and is_near(figures.usual_samples, setup.global_batch * batches):
            return batches
        return self.parts

    def _check_batch(
        self, setup: Setup, plan: RunPlan, record: Run, figures: RunFigures, parts: int
    ) -> tuple[str, str]:
        """Return how the batch was set, and why the record shows another one, or ""."""
        if not figures.usual_samples:
            return "", NO_SAMPLES
        if not plan.sets_batch:
            return "", ""
        how = TEMPLATE
        if not uses_template(self.request.args):
            told, why = recorded_batch(record)
            if why:
                return "", f"the batch can't be set: {why}. {NO_BATCH_HINT}"
            how = SHARD if told == SHARD else KNOB
        # A run that shows the parts was given the whole batch as each of them.
        wanted, found = setup.global_batch * parts // self.parts, figures.usual_samples
        if not is_near(found, wanted):
            return "", (
                f"the script trains {found:g} samples a step on {counted(setup.ranks, 'rank')} "
                f"instead of {wanted}: it does not use the batch that it was given "
                f"({how}). {NO_BATCH_HINT}"
            )
        return how, ""


def _other_layout(setup: Setup, figures: RunFigures) -> str:
    """Return why a run was not in the layout of its setup, or ""."""
    if not setup.layout or layout_over(figures.layout, setup.ranks) == setup.layout:
        return ""
    found = f"in {figures.layout!r}" if figures.layout else "without world.distribute"
    return (
        f"the script trains {found} instead of the layout {setup.layout!r}, which is set for "
        "world.distribute. HINT: model, optimizer = world.distribute(model, optimizer)"
    )


def is_near(found: float, wanted: int) -> bool:
    """Return whether the recorded samples of a step are the wanted ones."""
    return abs(found - wanted) <= BATCH_TOLERANCE * wanted
