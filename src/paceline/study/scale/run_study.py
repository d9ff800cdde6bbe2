"""Run the sizes of a scaling study, interleaved, until they are known or the time is over.

The study's folder is all that is known: a study that was interrupted or killed is continued by
calling ``run_study`` again.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...analyze.scaling.derived import estimate
from ...analyze.scaling.forecast import predict_next
from ...analyze.scaling.study_events import Progress, StudyListener
from ...analyze.scaling.study_folder import (
    FORMAT,
    RUNS_FOLDER,
    STUDY_FILE,
    VERSION,
    StoredStudy,
    read_runs,
    read_stored,
    read_study,
    store_predictions,
    write_study,
)
from ...analyze.scaling.study_model import (
    MAX_REPEATS,
    MIN_REPEATS,
    STRONG,
    TEMPLATE,
    UNKNOWN,
    WEAK,
    BatchSource,
    Prediction,
    RunFigures,
    ScalingStudy,
    Setup,
    StudyRequest,
    StudyRun,
)
from ...plurals import counted
from ..study_folder import create_folder, locked_sizes, remove_unfinished
from ..study_nodes import (
    StudyNodes,
    check_side_by_side,
    check_sizes,
    find_study_nodes,
    side_by_side,
)
from ..trials import ScriptRequest, Trials, rounds
from .daemon_processes import marked_processes
from .plan import (
    DEFAULT_MINUTES,
    FIRST_STEPS,
    Cost,
    choose_steps,
    new_setup,
    plan_points,
    run_limit_s,
    setups_of,
    total_steps,
    uses_template,
)
from .run_setup import RunPlan, SetupResult, SetupRunner, TimeOverError

LEAST_TARGET_S = 15.0  # below, no run to a target begins
TARGET_TIME_FACTOR = 2.0  # of its part of the time left, that a run to a target may take


# Predict sizes before they are measured, and store the predictions in the study's folder.

MIN_SIZES = 2  # measured ones of a kind, to predict another


def predict_setup(folder: Path, setup: Setup) -> list[Prediction]:
    """Predict a setup from smaller sizes, and store that, before its first run.

    Raises:
        OSError: The folder can't be written.
        ValueError: The study can't be read.
    """
    study = read_study(folder)
    kinds = {point.kind for point in study.points if point.setup == setup}
    found = [
        prediction
        for kind in sorted(kinds)
        if _measured(study, kind, setup.ranks) >= MIN_SIZES
        for prediction in predict_next(study, kind, [setup.ranks])
        if prediction.global_batch == setup.global_batch
    ]
    return _store(folder, study, found)


def predict_larger(folder: Path) -> list[Prediction]:
    """Predict the next two sizes of each kind, and store that. Raises as ``predict_setup``."""
    study = read_study(folder)
    found = [prediction for kind in study.request.kinds for prediction in predict_next(study, kind)]
    return _store(folder, study, found)


def _measured(study: ScalingStudy, kind: str, below: int) -> int:
    return sum(bool(point.figures) and point.ranks < below for point in study.of_kind(kind))


def _store(folder: Path, study: ScalingStudy, found: list[Prediction]) -> list[Prediction]:
    """Store the predictions that no earlier one from the same sizes replaces."""
    known = {
        (prediction.kind, prediction.ranks, prediction.model, tuple(prediction.sizes))
        for prediction in study.predictions
    }
    new = [
        prediction
        for prediction in found
        if (prediction.kind, prediction.ranks, prediction.model, tuple(prediction.sizes))
        not in known
    ]
    if new:
        store_predictions(folder, new)
    return new


def plan_study(request: StudyRequest) -> StoredStudy:
    """Return a new study. Raises ValueError: The request cannot be measured."""
    check_request(request)
    if request.global_batch is None:
        return StoredStudy(FORMAT, VERSION, request)
    how = TEMPLATE if uses_template(request.args) else UNKNOWN
    batch = BatchSource.of(how, request.global_batch)
    return StoredStudy(FORMAT, VERSION, request, batch, plan_points(request, batch))


def new_study(folder: Path, request: StudyRequest) -> StoredStudy:
    """Create the folder of a study.

    Raises:
        ValueError: It exists and is not empty, or the request cannot be measured.
        OSError: It can't be created.
    """
    study = plan_study(request)
    if request.ranks_per_host is None:  # not in jobs
        _check_nodes(request, find_study_nodes(request.where), request.sizes)
    create_folder(folder, STUDY_FILE)
    (folder / RUNS_FOLDER).mkdir(exist_ok=True)
    write_study(folder, study)
    return study


def check_request(request: StudyRequest) -> None:
    """Raise ValueError for a request that cannot be measured anywhere."""
    for size in request.sizes:
        try:
            new_setup(request, size, size)
        except ValueError as error:
            raise ValueError(f"--layout and -n do not fit: {error}, or other sizes") from None
    if uses_template(request.args) and request.global_batch is None:
        raise ValueError(
            "the script's arguments contain the batch of a size, and the batch is not given. HINT: "
            "--global-batch N, the batch of all ranks at the smallest size"
        )


def run_study(
    folder: Path,
    listener: StudyListener,
    minutes: float | None = None,
    only: Collection[int] | None = None,
) -> "StudyEnd":
    """Run what is missing of a study.

    Args:
        folder: Its folder.
        listener: Receives what happens.
        minutes: Time budget, instead of that of the request.
        only: Sizes that are run, if not all: a job of ``--submit`` measures one size.

    Raises:
        FolderInUseError: Another command works on the study.
        ValueError: The study cannot be measured here.
        OSError: The folder can't be written.
    """
    request = read_stored(folder).request
    nodes = find_study_nodes(request.where)
    _check_nodes(request, nodes, [size for size in request.sizes if only is None or size in only])
    options = _with_equal_cores(request, nodes)
    asked = ScriptRequest(
        request.script,
        request.args,
        options=options,
        minutes=minutes or request.minutes or DEFAULT_MINUTES,
    )
    folder = folder.absolute()
    with (
        locked_sizes(folder, listener.message, only),
        marked_processes(),
        contextlib.chdir(request.cwd),
        Trials(asked, listener.message, "paceline-scale-", folder) as trials,
    ):
        runner = SetupRunner(folder, request, nodes, trials)
        return _StudyRun(folder, read_stored(folder), runner, listener, only).run()


def _check_nodes(request: StudyRequest, nodes: StudyNodes, sizes: Sequence[int]) -> None:
    if not request.oversubscribe:
        check_sizes(sizes, nodes)
    if request.side_by_side:
        check_side_by_side(nodes)


def _with_equal_cores(request: StudyRequest, nodes: StudyNodes) -> list[str]:
    """Return the options of all runs: each rank has as many cores at every size.

    Where ranks share cores (``--oversubscribe``), each has one thread at every size.
    """
    largest = max(request.sizes)
    full = request.ranks_per_host or -(-largest // nodes.hosts_of(largest))
    cores = nodes.cores_of_rank(full)
    given = {"--cpus-per-rank", "--threads"} & set(request.options)
    if cores is None or given:
        return request.options
    if full > (nodes.cores or full):
        return [*request.options, "--threads", "1"]
    return [*request.options, "--cpus-per-rank", str(cores)]


@dataclass(frozen=True)
class StudyEnd:
    """How ``run_study`` ended.

    Attributes:
        study: The study with all that was measured.
        interrupted: Whether the user interrupted it.
    """

    study: ScalingStudy
    interrupted: bool = False


class _StudyRun:
    """The loop over the runs of a study."""

    def __init__(
        self,
        folder: Path,
        stored: StoredStudy,
        runner: SetupRunner,
        listener: StudyListener,
        only: Collection[int] | None,
    ) -> None:
        self.folder, self.stored, self.runner, self.listener = folder, stored, runner, listener
        self.request, self.only = stored.request, only
        self.deadline, self.began = runner.trials.deadline, time.monotonic()
        self.runs = read_runs(folder)[0]
        self.first_cost: Cost | None = None
        self.no_time: set[Setup] = set()  # setups whose next run does not fit into the time
        self.runs_done = 0

    def run(self) -> StudyEnd:
        interrupted = False
        try:
            self._prepare()
            self.listener.study_started(read_study(self.folder), self._progress())
            for setups in rounds(self._unfinished, max(MAX_REPEATS, self.request.seeds)):
                for group in self._groups(setups):
                    self._run_group(group)
        except TimeOverError:
            pass
        except KeyboardInterrupt:
            interrupted = True
        if self.only is None:
            predict_larger(self.folder)
        study = read_study(self.folder)
        self.listener.study_ended(study, self._progress())
        return StudyEnd(study, interrupted)

    # Before the first repeat

    def _prepare(self) -> None:
        """Find the batch, the points and the number of steps."""
        stored = self.stored
        remove_unfinished(self.folder, self._sizes())
        if stored.points and not self._unfinished():
            return
        good = [run for run in self.runs if run.figures is not None]
        self.runner.parts = max((run.batch_parts for run in good), default=1)
        if stored.batch is None or not good:
            self._first_run()
        cost = self._cost()
        if not self.stored.steps:
            runs = [cost] * len(self._setups()) * MIN_REPEATS
            steps = choose_steps(self.request, runs, self.deadline.left_s)
            self._store(replace(self.stored, steps=steps))
        self._leave_out_weak(cost)

    def _first_run(self) -> None:
        """Run the smallest size once, for the duration of its steps and the batch of the script.

        If the batch is known and the smallest size fails, the next one is used.

        Raises:
            ValueError: It fails.
        """
        smallest = min(self._sizes())
        known = self.stored.batch is not None
        first = new_setup(self.request, smallest, smallest)
        what = "the duration of a step" if known else "the duration of a step and the batch"
        failures = []
        for setup in self._setups() if known else [first]:
            self.listener.message(
                f"first run: {counted(setup.ranks, 'rank')}, {FIRST_STEPS} steps, to measure {what}"
            )
            before = time.monotonic()
            plan = RunPlan(FIRST_STEPS, sets_batch=known, finds_parts=known)
            result = self.runner.first_run(setup, plan)
            took_s = time.monotonic() - before
            if result.run.figures is not None:
                self._learn(result, result.run.figures, took_s)
                return
            failures.append(result.text or result.run.failure)
        raise ValueError(f"the study can't begin: {failures[0]}")

    def _learn(self, result: SetupResult, figures: RunFigures, took_s: float) -> None:
        """Store what the first run has shown."""
        step_s = statistics.median(figures.step_s)
        self.first_cost = Cost(max(took_s - FIRST_STEPS * step_s, 0.1), step_s)
        self.runner.parts = result.run.batch_parts
        batch = self.stored.batch
        if batch is None:
            batch = BatchSource(UNKNOWN, max(round(figures.usual_samples), 1))
        points = plan_points(self.request, batch, self.runner.parts)
        if self.stored.batch is None:
            self._store(replace(self.stored, batch=batch, points=points))
        self._note_batch(result.run)

    def _leave_out_weak(self, cost: Cost) -> None:
        """Leave out weak scaling if the user did not ask for it and the time is too short."""
        kinds = {point.kind for point in self.stored.points}
        wanted = self.request.weak_if_time and not self.request.until
        if not wanted or kinds != {STRONG, WEAK} or self.only is not None:
            return
        strong = [point for point in self.stored.points if point.kind == STRONG]
        each_s = cost.run_s(total_steps(self.stored.steps))
        both_s = each_s * len(self._setups()) * MIN_REPEATS
        if both_s <= self.deadline.left_s:
            return
        note = (
            f"weak scaling is left out: {MIN_REPEATS} runs of each size of both kinds take about "
            f"{both_s / 60:.0f} min. HINT: --minutes {math.ceil(both_s / 60)}, or --weak"
        )
        self.listener.message(note)
        self._store(replace(self.stored, points=strong, notes=[*self.stored.notes, note]))

    def _store(self, stored: StoredStudy) -> None:
        self.stored = stored
        if self.only is None:  # jobs of several sizes must not overwrite each other's
            write_study(self.folder, stored)

    # Repeats

    def _sizes(self) -> list[int]:
        return [size for size in self.request.sizes if self.only is None or size in self.only]

    def _setups(self) -> list[Setup]:
        setups = setups_of(self.stored.points)
        return [setup for setup in setups if self.only is None or setup.ranks in self.only]

    def _unfinished(self) -> list[Setup]:
        """Return the setups that need more runs, by ranks."""
        return [
            setup
            for setup in self._setups()
            if setup not in self.no_time and not self._is_known(setup)
        ]

    def _is_known(self, setup: Setup) -> bool:
        mine = [run for run in self.runs if run.setup == setup]
        good = [run.figures for run in mine if run.figures is not None]
        if len(mine) > len(good):  # a run that failed is not repeated
            return True
        if self.request.until:
            return len(good) >= self.request.seeds
        if len(good) < MIN_REPEATS:
            return False
        rates = [figures.throughput for figures in good]
        return len(good) >= MAX_REPEATS or estimate(rates).precision <= self.request.precision

    def _groups(self, setups: list[Setup]) -> list[list[Setup]]:
        """Return the setups that run at the same time: one, unless the user asked for more."""
        if not self.request.side_by_side:
            return [[setup] for setup in setups]
        return side_by_side(setups, self.runner.nodes)

    def _use_fewer_steps(self) -> None:
        """Shorten the next runs if steps take longer than the first run has shown."""
        counts = {setup: self._runs_left(setup) for setup in self._unfinished()}
        left_s = self.deadline.left_s
        if (
            self.request.until
            or sum(n * self._expected_s(one) for one, n in counts.items()) < left_s
        ):
            return
        runs = [self._cost_of(setup) for setup, count in counts.items() for _ in range(count)]
        steps = choose_steps(self.request, runs, left_s)
        if runs and steps < self.stored.steps:
            self._store(replace(self.stored, steps=steps))

    def _run_group(self, setups: list[Setup]) -> None:
        self._use_fewer_steps()
        expected_s = {setup: self._expected_s(setup) for setup in setups}
        least_s = LEAST_TARGET_S * bool(self.request.until)
        late = {setup for setup in setups if max(expected_s[setup], least_s) > self.deadline.left_s}
        self.no_time |= late
        setups = [setup for setup in setups if setup not in late]
        if not setups:
            return
        for setup in setups:
            repeat = sum(run.setup == setup for run in self.runs)
            if not repeat and self.only is None:
                predict_setup(self.folder, setup)
            self.listener.run_started(setup, repeat, expected_s[setup], self._progress())
        plan = self._plan(max(expected_s[setup] for setup in setups))
        for result in self.runner.run(setups, plan):
            self.runs.append(result.run)
            self.runs_done += 1
            self._note_batch(result.run)
            self.listener.run_ended(result.run, read_study(self.folder), self._progress())

    def _plan(self, expected_s: float) -> RunPlan:
        """Return the plan of the next run. A run to the target gets a part of the time left."""
        if self.request.until:
            runs_left = sum(self._runs_left(setup) for setup in self._unfinished())
            limit_s = TARGET_TIME_FACTOR * self.deadline.left_s / max(runs_left, 1)
            return RunPlan(0, limit_s=max(limit_s, LEAST_TARGET_S))
        return RunPlan(total_steps(self.stored.steps), limit_s=run_limit_s(expected_s))

    def _runs_left(self, setup: Setup) -> int:
        done = sum(run.setup == setup for run in self.runs)
        wanted = self.request.seeds if self.request.until else MIN_REPEATS
        return max(wanted - done, 1)

    def _note_batch(self, run: StudyRun) -> None:
        """Store and say how the batch is set, once a run has shown it."""
        batch = self.stored.batch
        assert batch is not None, "the batch is found before the first run"
        if run.batch_how and batch.how == UNKNOWN:
            batch = BatchSource.of(run.batch_how, batch.base, run.batch_parts)
            self._store(replace(self.stored, batch=batch))
            self.listener.message(f"batch: {batch.text}")

    # Costs

    def _cost(self) -> Cost:
        """Return what runs cost at the smallest size that was run."""
        good = [run for run in self.runs if run.figures is not None]
        if not good:
            assert self.first_cost is not None, "without runs, the first run is made"
            return self.first_cost
        smallest = min(run.setup.ranks for run in good)
        steps = _steps_s([run for run in good if run.setup.ranks == smallest])
        return Cost(statistics.median(map(_start_s, good)), statistics.median(steps))

    def _cost_of(self, setup: Setup) -> Cost:
        """Return what a run of a setup costs: as earlier ones, or as those of the smallest size."""
        mine = [run for run in self.runs if run.setup == setup and run.figures is not None]
        if not mine:
            return self._cost()
        starts_s = [_start_s(run) for run in mine]
        return Cost(statistics.median(starts_s), statistics.median(_steps_s(mine)))

    def _expected_s(self, setup: Setup) -> float:
        """Return the expected duration of a run; 0 if it is not known, before one to a target."""
        if not self.request.until:
            return self._cost_of(setup).run_s(total_steps(self.stored.steps))
        mine = [run.took_s for run in self.runs if run.setup == setup and run.figures is not None]
        return statistics.median(mine) if mine else 0.0

    def _progress(self) -> Progress:
        counts = {setup: self._runs_left(setup) for setup in self._unfinished()}
        each_s = {setup: self._expected_s(setup) for setup in counts}
        left: float | None = sum(more * each_s[setup] for setup, more in counts.items())
        left = None if 0.0 in each_s.values() else min(left or 0.0, self.deadline.left_s)
        elapsed_s = time.monotonic() - self.began
        return Progress(elapsed_s, left, self.runs_done, sum(counts.values()))


def _steps_s(runs: Sequence[StudyRun]) -> list[float]:
    return [run.figures.mean_step_s for run in runs if run.figures is not None]


def _start_s(run: StudyRun) -> float:
    """Return the time of a run outside of its measured and dropped steps."""
    figures = run.figures
    assert figures is not None
    steps = figures.first_step + len(figures.step_s)
    return max(run.took_s - steps * figures.mean_step_s, 0.1)
