"""One run of a scaling study: a setup of ranks and batch, from the trial to its figures on disk."""

import math
import os
import resource
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...analyze.records.load_run import Run
from ...analyze.records.state_timeline import find_window
from ...analyze.reference.metric import Goal, parse_goal
from ...analyze.reference.reference_file import RECORD_FILE, read_reference
from ...analyze.reference.series import Series
from ...analyze.scaling.figures_of_run import figures_of_run, recorded_batch
from ...analyze.scaling.study_folder import LOG_FILE, RECORD_FOLDER, RUNS_FOLDER, write_run
from ...analyze.scaling.study_model import (
    KNOB,
    SHARD,
    TEMPLATE,
    EnergyReading,
    MachineState,
    RunFigures,
    Setup,
    StudyRequest,
    StudyRun,
    TargetResult,
    layout_over,
)
from ...cluster.energy import EnergyMeter
from ...cluster.topology.local_resources import allowed_threads
from ...knobs.layouts import LAYOUT as LAYOUT_KNOB
from ...knobs.loading import BATCH as BATCH_KNOB
from ...plurals import counted, parse_ranges
from ...record.ring.recorder import clock_id
from ...record.ring.states import State
from ..study_folder import FIRST, SCRATCH_FOLDER, new_run_folder, remove_run, remove_scratch
from ..study_nodes import StudyNodes
from ..trials import (
    SEED,
    InterruptedTrialError,
    NoResultError,
    Trial,
    Trials,
    TrialSpec,
    seed_options,
    step_limit_options,
)
from .daemon_processes import DaemonProcesses
from .plan import filled_in, uses_template

BATCH_TOLERANCE = 0.01  # relative difference of the recorded samples of a step
NO_BATCH_HINT = (
    "HINT: put the batch into the script's arguments: --batch-size {per_rank}, or {global} for the "
    "batch of all ranks"
)
NO_SAMPLES = (
    "the record has no samples, so the batch can't be checked. HINT: read the batches of the "
    "training from a DataLoader, or with world.batches"
)


# Runs of a scaling study that train until a target (``paceline scale --until``).

NS = 1e-9


def target_options(request: StudyRequest, seed: int) -> list[str]:
    """Return the options of ``paceline run`` for a run with this seed; none without a target.

    The launcher ends the run when the target is reached.
    """
    if not request.until:
        return []
    metric = request.metric or parse_goal(request.until).name
    return ["--metric", metric, "--until", request.until, *seed_options(request.args, seed)]


def target_result(
    request: StudyRequest, record: Path, run: Run | None, setup: Setup
) -> TargetResult | None:
    """Return how a run ended; None without a target.

    Args:
        record: Folder of the record, which also holds the values of the metric.
        run: The record; None if it can't be read.
        setup: Its global batch counts the samples if the job did not.

    Raises:
        ValueError: The values can't be read.
    """
    if not request.until:
        return None
    goal = parse_goal(request.until, request.metric or None)
    ends = _step_ends(run)
    last = max(ends, default=0)
    samples, seconds = last * setup.global_batch, ends.get(last, 0.0)
    missed = TargetResult(str(goal), False, None, last, samples, seconds)
    if not (record / RECORD_FILE).exists():
        return missed
    return _from_values(goal, read_reference(record).runs[0], missed, ends, setup)


def _from_values(
    goal: Goal, values: Series, missed: TargetResult, ends: dict[int, float], setup: Setup
) -> TargetResult:
    rate = values.peak_rate if math.isfinite(values.peak_rate) else None
    best = goal.best(float(value) for value in values.values)
    missed = replace(missed, best=best, learning_rate=rate)
    reached = [at for at, value in enumerate(values.values) if goal.is_reached(float(value))]
    if not reached:
        return missed
    at = reached[0]
    step = int(values.steps[at])
    counted = values.samples[at]
    samples = int(counted) if np.isfinite(counted) and counted > 0 else step * setup.global_batch
    seconds = ends.get(step, missed.seconds)
    return replace(missed, reached=True, steps=step, samples=samples, seconds=seconds)


def _step_ends(run: Run | None) -> dict[int, float]:
    """Return when each step of the first rank ended, in s from the start of its first step."""
    if run is None or not run.records:
        return {}
    first = min(run.records, key=lambda record: record.rank)
    events = first.events_in(State.STEP)
    if not len(events):
        return {}
    start = int(events["start"].min())
    return {int(row["step"]): (int(row["end"]) - start) * NS for row in events}


# Watch the machine during a run: clock frequency of its cores, and the load of other processes.

INTERVAL_S = 0.5
CPUS = Path("/sys/devices/system/cpu")
STAT = Path("/proc/stat")
IDLE_COLUMNS = (4, 5)  # of the line "cpuN user nice system idle iowait ..."


class MachineWatch:
    """Samples the clock of this process's cores in a thread, from ``start`` to ``stop``.

    The load of other processes is the processor time of these cores minus that of this process, of
    its children that have ended, and of ranks that a daemon has started.

    Args:
        by_daemon: Whether a daemon of the scheduler starts the ranks.
    """

    def __init__(self, by_daemon: bool = False, cpus: Path = CPUS, stat: Path = STAT) -> None:
        self._cores, self._cpus, self._stat = allowed_threads(), cpus, stat
        self._daemon_processes = DaemonProcesses() if by_daemon else None
        self._samples: list[float] = []
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to sample."""
        self._before = self._busy_s(), _children_s(), time.monotonic()
        self._thread = threading.Thread(target=self._sample, name="machine watch", daemon=True)
        self._thread.start()

    def stop(self) -> MachineState:
        """Return what was seen since ``start``."""
        self._over.set()
        self._thread.join()
        busy, children, seconds = self._busy_s(), _children_s(), time.monotonic()
        daemon = self._daemon_processes
        if daemon is not None:
            daemon.sample()
        notes: list[str] = []
        other = None
        if busy is None or self._before[0] is None:
            notes.append(f"the load of other processes can't be read from {self._stat}")
        elif daemon is not None and not daemon.found:
            notes.append(
                "the load of other processes is not known: the scheduler starts the ranks, and "
                "their processes can't be told from others"
            )
        else:
            length = max(seconds - self._before[2], 1e-9)
            ours = children - self._before[1] + (daemon.seconds if daemon is not None else 0.0)
            other = max((busy - self._before[0] - ours) / length, 0.0)
        if not self._samples:
            notes.append(f"the clock frequency can't be read: no cpufreq in {self._cpus}")
            return MachineState(None, None, other, notes)
        mean, low = statistics.fmean(self._samples), min(self._samples)
        return MachineState(mean, low, other, notes)

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL_S):
            if self._daemon_processes is not None:
                self._daemon_processes.sample()
            found = [mhz for core in self._cores if (mhz := self._mhz(core)) is not None]
            if found:
                self._samples.append(statistics.fmean(found))

    def _mhz(self, core: int) -> float | None:
        try:
            text = (self._cpus / f"cpu{core}/cpufreq/scaling_cur_freq").read_text()
            return int(text) / 1000
        except (OSError, ValueError):
            return None

    def _busy_s(self) -> float | None:
        """Return the processor time of this process's cores, in s; None if it can't be read."""
        names = {f"cpu{core}" for core in self._cores}
        ticks = 0
        try:
            for line in self._stat.read_text().splitlines():
                words = line.split()
                if words and words[0] in names:
                    numbers = [int(word) for word in words[1:9]]
                    ticks += sum(n for i, n in enumerate(numbers, 1) if i not in IDLE_COLUMNS)
        except (OSError, ValueError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime


# Energy of the measured steps of a run, from the counters of the launcher's node.

SEVERAL_NODES = (
    "the energy of a run on several nodes is not measured: each node reads only its own counters"
)
OTHER_NODE = (
    "the energy is not measured: the ranks ran on another node than paceline scale, which reads "
    "only its own counters"
)


def measured_energy(
    meter: EnergyMeter, run: Run, figures: RunFigures, hosts: int
) -> tuple[list[EnergyReading], list[str]]:
    """Return the energy of the measured steps, and what could not be read.

    The job is charged for the cores that its ranks may use. A counter that is part of another one
    is left out.
    """
    steps = figures.first_step, figures.first_step + len(figures.step_s)
    window = find_window(run.records, steps) if hosts == 1 else None
    if hosts > 1:
        return [], [SEVERAL_NODES]
    if any(record.meta.get("clock") != clock_id() for record in run.records):
        return [], [OTHER_NODE]
    if window is None:
        return [], meter.notes
    start, end = window.start / 1e9, window.end / 1e9
    readings = [
        EnergyReading(charge.source, charge.between(start, end), charge.is_estimate, charge.how)
        for charge in meter.charged(_cores(figures))
        if not charge.within
    ]
    return readings, meter.notes


def _cores(figures: RunFigures) -> Sequence[int] | None:
    """Return the cores of all ranks; None if they are unknown."""
    found: set[int] = set()
    for rank in figures.placement:
        if rank.cores is None:
            return None
        found.update(parse_ranges(rank.cores))
    return sorted(found) or None


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
        nodes: Where the sizes run.
        trials: Runs the script.

    Attributes:
        parts: Parts of the global batch. A script that accumulates gradients trains several
            batches a step; each is one part, which is set in the runs.
    """

    def __init__(
        self, folder: Path, request: StudyRequest, nodes: StudyNodes, trials: Trials
    ) -> None:
        self.folder, self.request, self.nodes, self.trials = folder, request, nodes, trials
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
            first_host += self.nodes.hosts_of(setup.ranks)
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
        watch, meter = MachineWatch(self.nodes.by_daemon), EnergyMeter().start()
        watch.start()
        try:
            trials = self.trials.run_trials([self._spec(run) for run in begun])
        except InterruptedTrialError:
            for run in begun:
                remove_run(run.path)
            raise
        finally:
            machine = watch.stop()
            meter.stop()
            for run in begun:
                remove_scratch(run.path)
        results = []
        for run, trial in zip(begun, trials, strict=True):
            if trial.code is None and not self.trials.deadline.left_s and run.plan.steps:
                remove_run(run.path)
            else:
                results.append(self._result(run, trial, machine, meter))
        return results

    def _spec(self, begun: "_Begun") -> TrialSpec:
        request, setup, plan, folder = self.request, begun.setup, begun.plan, begun.path
        options = step_limit_options(self.trials, plan.steps, folder / SCRATCH_FOLDER)
        options += [] if plan.steps else target_options(request, begun.repeat)
        settings = dict(request.settings)
        settings |= {LAYOUT_KNOB: setup.layout} if setup.layout else {}
        if plan.sets_batch and not uses_template(request.args):
            settings[BATCH_KNOB] = setup.global_batch // self.parts
        return TrialSpec(
            folder / RECORD_FOLDER,
            folder / LOG_FILE,
            options,
            ranks=setup.ranks,
            where=self.nodes.where(setup.ranks, begun.first_host),
            args=filled_in(request.args, setup, begun.repeat, self.parts),
            settings=settings,
            limit_s=plan.limit_s,
        )

    def _result(
        self, begun: "_Begun", trial: Trial, machine: MachineState, meter: EnergyMeter
    ) -> SetupResult:
        """Return the result of a trial that ended."""
        setup = begun.setup
        run = StudyRun(
            f"{RUNS_FOLDER}/{begun.path.name}",
            setup,
            begun.repeat,
            hosts=self.nodes.hosts_of(setup.ranks),
            took_s=trial.took_s,
            started=trial.started,
        )
        try:
            who = counted(setup.ranks, "rank")
            record = trial.finished_record(who, may_end_early=not begun.plan.steps)
            return SetupResult(self._measured(begun, run, trial, record, machine, meter))
        except NoResultError as failure:
            return SetupResult(replace(run, failure=str(failure)), text=failure.text)
        except ValueError as error:
            return SetupResult(replace(run, failure=str(error)))

    def _measured(
        self,
        begun: "_Begun",
        run: StudyRun,
        trial: Trial,
        record: Run,
        machine: MachineState,
        meter: EnergyMeter,
    ) -> StudyRun:
        """Return the run with its figures. Raises ValueError if they cannot be used."""
        plan = begun.plan
        figures = figures_of_run(record)
        folder = begun.path / RECORD_FOLDER
        end = None if plan.steps else target_result(self.request, folder, record, run.setup)
        has_seed = end is not None or any(SEED in word for word in self.request.args)
        seed = run.repeat if has_seed else None
        figures = replace(figures, machine=machine, seed=seed, wall_s=trial.took_s, to_target=end)
        energy, notes = measured_energy(meter, record, figures, begun.first_host + run.hosts)
        figures = replace(figures, energy=energy, energy_notes=notes)
        if why := _other_layout(run.setup, figures):
            raise NoResultError(why)
        parts = self._parts(run.setup, plan, figures)
        how, why = self._check_batch(run.setup, plan, record, figures, parts)
        if why:
            raise NoResultError(why)
        return replace(run, figures=figures, batch_how=how, batch_parts=parts)

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
            recorded, why = recorded_batch(record)
            if why:
                return "", f"the batch can't be set: {why}. {NO_BATCH_HINT}"
            how = SHARD if recorded == SHARD else KNOB
        # A run that shows the parts was given the whole batch as each of them.
        wanted, found = setup.global_batch * parts // self.parts, figures.usual_samples
        if is_near(found, wanted):
            return how, ""
        hint = NO_BATCH_HINT
        if how == TEMPLATE:
            hint = "HINT: create the training DataLoader with this argument"
        return "", (
            f"the script trains {found:g} samples a step on {counted(setup.ranks, 'rank')} instead "
            f"of {wanted}: it does not use the batch that it was given ({how}). {hint}"
        )


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
