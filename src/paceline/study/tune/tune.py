"""``paceline tune``: begin, continue or fork a study, and run its trials.

The runner starts trials where there is room, and asks the search about them. All that it knows is
in the journal and in the folders of the trials, so it may be killed at any moment: ``run`` of a new
runner continues. A trial that ran is run again under its number, from its checkpoint if it has one;
one that had ended meanwhile is not.
"""

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ...launch.job import Job, check, preloads
from ...launch.options import NodeOptions
from ...launch.remote.forwarded_env import parse_env_options
from ...record.trial_reports import VARIABLE, LineReader, Report, TrialRequest
from ...report.tuning.tuning_view import TuneListener, TuningView
from ..script_runs.run_process import MINUTE_S, Deadline
from ..study_nodes import Seat, TrialNodes, find_trial_nodes
from .command import CHECKPOINT, EPOCHS, FOLDER, RANKS, SEED, TRIAL
from .journal import check_installed, full_disk_in_words
from .open_study import OpenStudy, begin_study, continue_study, fork_study, locked, read_study
from .searches.registry import check_search, make_search, search_class
from .searches.search import Decision, Failure, MissedStepError, Outcome, Search, Work
from .study_file import StudySpec, read_study_file
from .study_view import StudyRows, read_view
from .trial_folder import TrialFolder, add_figures, add_old_figures, good_attempts
from .trial_outcome import (
    DIVERGED,
    INTERRUPTED_CODES,
    NO_CHECKPOINT,
    NO_METRIC,
    TIME_LIMIT,
    PatternReader,
    StudyStoppedError,
    TrialOutcomes,
    TrialRun,
    summary_facts,
)
from .trial_server import TrialServer, TrialStart

# Between two looks at the reports of the trials: not more often than a shared file system bears.
MIN_POLL_S, POLL_OF_TRIAL_S = 0.02, 0.005
END_TIMEOUT_S = 40.0  # for trials to write a checkpoint and end
OLD_ATTEMPT_TIMEOUT_S = 5.0  # for the processes of a runner that was killed
SAME_FAILURES = 3  # of the first trials: the study stops
SAME_DIVERGED = 10  # the same for diverged trials: many points of a wide range may


class Runner:
    """Runs the trials of a study.

    Args:
        opened: The study, of which the caller holds the lock.
        search: Its search.
        nodes: Where trials run.
        server: Starts them.
        listener: Receives what happens.
        minutes: Time budget; None: no limit.
        interrupted: Returns whether the user asks to end.
        stage: Packed datasets that each node stages once, for all trials.
    """

    def __init__(
        self,
        opened: OpenStudy,
        search: Search,
        nodes: TrialNodes,
        server: TrialServer,
        listener: TuneListener,
        minutes: float | None,
        interrupted: Callable[[], bool],
        stage: Sequence[str] = (),
    ) -> None:
        self.stage = stage
        self.opened, self.search, self.nodes = opened, search, nodes
        self.spec, self.study, self.table = opened.spec, opened.study, opened.spec.table
        self.server, self.listener, self.interrupted = server, listener, interrupted
        self.deadline = Deadline.after(minutes * MINUTE_S) if minutes else None
        self._began = time.monotonic()
        self._running: dict[int, TrialRun] = {}  # by number in the server
        self._started = 0
        self._waiting: list[Work] = []  # without a seat, or to be repeated
        self._first_failures: list[str] | None = []
        self._ended_here = 0
        self._cleared: set[int] = set()  # trials whose checkpoints were removed
        self._variables = parse_env_options(list(self.table.env))
        self.rows = StudyRows(opened, search)
        self.outcomes = TrialOutcomes(self.spec, search, nodes, self.rows, listener.message)

    def run(self) -> bool:
        """Run the study; return whether it is complete.

        Raises:
            StudyStoppedError: It can't go on. All trials that ran are interrupted.
            OSError: A file can't be written.
        """
        self._settle_old_attempts()
        self.listener.study_started(self.view())
        try:
            while True:
                over = self._is_over()
                if not over:
                    self._fill()
                if not self._running:
                    break
                if over:
                    self._end_all(over)
                self._poll()
            complete = not over and not self._waiting
            if complete:
                self.search.finish()
            return complete
        except Exception:
            self._interrupt_all()
            raise
        finally:
            self.rows.read()
            self.listener.study_ended(self.view())

    # What runs next

    def _is_over(self) -> str:
        """Return why no further trial may start, or ""."""
        if self.interrupted():
            return "interrupted"
        if self.deadline is not None and not self.deadline.left_s:
            return "time"
        return ""

    def _is_spent(self) -> bool:
        """Return whether the budget of node-hours or epochs is used; trials that run go on."""
        hours, epochs = self.table.node_hours, self.table.total_epochs
        if hours is not None and self._node_hours() >= hours:
            return True
        return epochs is not None and sum(row.steps for row in self.rows.by_number) >= epochs

    def _fill(self) -> None:
        """Start trials while there is room."""
        most = self.table.side_by_side
        while most is None or len(self._running) < most:
            if self.nodes.is_full:
                return
            if self._waiting:
                work: Work | None = self._waiting.pop(0)
            elif self._is_spent() and not self.search.interrupted:
                return
            else:
                work = self.search.ask(self.search.count < self.table.trials)
            if work is None:
                return
            seat = self.nodes.take(work.ranks)
            if seat is None:
                self._waiting.insert(0, work)
                return
            self._start(work, seat)

    def _start(self, work: Work, seat: Seat) -> None:
        folder = self.opened.trial(work.number)
        self._check_ended(work.number, folder)
        add_old_figures(work.trial, folder)
        attempt, parent = folder.begin_attempt(), ""
        if work.checkpoint_of is not None and not folder.has_checkpoint:
            other = self.opened.trial(work.checkpoint_of)
            parent = str(other.path)
            if not other.has_checkpoint:
                self.nodes.give_back(seat)
                text = (
                    f"it begins from the checkpoint of trial {work.checkpoint_of}, and there is "
                    f"none in {other.checkpoint}. HINT: let nothing else remove files of the study "
                    f"while it runs; paceline tune {self.spec.path} --fork begins again"
                )
                self._tell(work, Outcome("failed", failure=Failure(NO_CHECKPOINT, text)))
                return
        every, steps = self.search.decides_at()
        request = TrialRequest(
            str(attempt.reports),
            str(attempt.answers),
            self.spec.reported[0],
            every,
            list(steps),
            self.search.exchanges,
        )
        self._started += 1
        start = TrialStart(
            number=self._started,
            trial=str(folder.path),
            attempt=attempt.number,
            words=self.spec.words(work.values, self._own_values(work, folder)),
            ranks=work.ranks,
            share=seat.share,
            folder=str(self.spec.folder),
            hosts=seat.hosts,
            launcher=self.nodes.launcher if seat.hosts else None,
            variables={**self._variables, VARIABLE: msgspec.json.encode(request).decode()},
            hang_timeout=self.table.hang_timeout,
            nodes=self.nodes.share_of_nodes(seat),
            stage=list(self.stage),
            settings=self.spec.knobs(work.values),
            parent=parent,
        )
        self.search.running.add(work.number)
        self.server.start(start)
        pattern = self.spec.patterns.get(self.spec.reported[0])
        self._running[self._started] = TrialRun(
            self._started,
            work,
            seat,
            folder,
            attempt,
            LineReader(attempt.reports, Report),
            PatternReader(pattern, attempt.output) if pattern else None,
            time.monotonic(),
        )
        row = replace(self.rows.refresh(work.number), ranks=work.ranks)
        self.listener.trial_started(row, self.view())

    def _own_values(self, work: Work, folder: TrialFolder) -> dict[str, str]:
        seed = self.table.seed + len(good_attempts(folder))
        return {
            CHECKPOINT: str(folder.checkpoint),
            FOLDER: str(folder.path),
            TRIAL: str(work.number),
            SEED: str(seed),
            RANKS: str(work.ranks),
            EPOCHS: str(self.table.epochs or ""),
        }

    # What happens

    def _poll(self) -> None:
        """Wait for reports and ends of trials, and act on them."""
        ended = self.server.ended(max(MIN_POLL_S, POLL_OF_TRIAL_S * len(self._running)))
        for run in list(self._running.values()):
            self._take_reports(run)
        for number, code in ended:
            run = self._running.pop(number)
            self._take_reports(run)
            self.nodes.give_back(run.seat)
            self._ended(run, code)

    def _take_reports(self, run: TrialRun) -> None:
        metric = self.spec.reported[0]
        found = [] if run.pattern is None else run.pattern.read()
        for report in run.reader.read():
            if report.waits:
                self._signal(run, signal.SIGINT)
            elif metric in report.values and run.pattern is None:
                found.append((report.step, float(report.values[metric])))
        for step, value in found:
            self._take_value(run, step, value)
        limit = self.table.trial_minutes
        if limit and not run.ending and time.monotonic() - run.begun > limit * MINUTE_S:
            self._fail(run, Failure(TIME_LIMIT, f"it took over {limit:g} min (trial_minutes)"))

    def _take_value(self, run: TrialRun, step: int, value: float) -> None:
        """Take a value of the first metric; the first one of a step counts."""
        if step in run.seen or run.ending not in ("", "interrupted"):
            return
        run.seen.add(step)
        every, steps = self.search.decides_at()
        is_asked = every or step in steps
        if value - value != 0:  # not finite
            name = self.spec.reported[0]
            self._fail(run, Failure(DIVERGED, f"{name} is {value} at step {step}"))
            return
        decision = Decision.CONTINUE
        if len(self.spec.metrics) == 1:
            try:
                decision = self.search.report(run.work, step, value)
            except MissedStepError as error:
                self._fail(run, Failure(NO_METRIC, str(error)))
            self.rows.refresh(run.work.number)
            self.listener.progress(self.view())
        if run.ending == "failed":
            return
        ends_here = self.search.exchanges and decision == Decision.PAUSE
        if run.ending and not ends_here:  # it writes a checkpoint and ends: rank 0 must go on
            decision = Decision.CONTINUE
        if is_asked:
            run.attempt.answer(step, decision)
        if decision == Decision.CONTINUE:
            return
        run.ending = "paused" if decision == Decision.PAUSE else "stopped"
        if decision == Decision.STOP:
            self._signal(run, signal.SIGINT)
        elif run.pattern is not None:  # its script does not wait
            self._signal(run, signal.SIGTERM)

    def _fail(self, run: TrialRun, failure: Failure) -> None:
        run.ending, run.failure = "failed", failure
        self._signal(run, signal.SIGINT)

    def _signal(self, run: TrialRun, kind: int) -> None:
        if run.signalled:
            return
        run.signalled = True
        self.server.signal(run.number, kind)

    def _ended(self, run: TrialRun, code: int) -> None:
        """Store how a run ended, or repeat it."""
        self.search.running.discard(run.work.number)
        self._store_figures(run)
        if run.ending == "interrupted" and code:
            return
        outcome = self.outcomes.outcome(run, code)
        if outcome is None:
            self._waiting.append(run.work)
        else:
            self._tell(run.work, outcome)

    def _tell(self, work: Work, outcome: Outcome) -> None:
        self.search.tell(work, outcome)
        self._ended_here += 1
        self.listener.trial_ended(self.rows.refresh(work.number), self.view())
        for number in set(self.search.unneeded()) - self._cleared:
            self.opened.trial(number).remove_checkpoint()
            self._cleared.add(number)
        self._check_first(work, outcome)

    def _check_first(self, work: Work, outcome: Outcome) -> None:
        """Stop the study if its first trials all fail in the same way.

        Raises:
            StudyStoppedError: They do.
        """
        if self._first_failures is None:
            return
        failure = outcome.failure
        if failure is None:
            self._first_failures = None
            return
        self._first_failures.append(failure.kind)
        count = len(self._first_failures)
        most = {NO_METRIC: 1, NO_CHECKPOINT: 1, DIVERGED: SAME_DIVERGED}
        enough = count >= most.get(failure.kind, SAME_FAILURES)
        if len(set(self._first_failures)) > 1:
            self._first_failures = None
        elif enough or count >= self.table.trials:
            what = (
                f"trial {work.number} has" if count == 1 else f"the first {count} trials have all"
            )
            raise StudyStoppedError(
                f"{what} failed ({failure.kind}): {failure.text.strip()}\nHINT: the output is in "
                f"{self.opened.trial(work.number).attempts()[-1].output}; correct the cause, then "
                f"paceline tune {self.spec.path} --continue"
            )

    def _store_figures(self, run: TrialRun) -> None:
        seconds = time.monotonic() - run.begun
        figures = [seconds, self._hours(run.seat, seconds)]
        facts = summary_facts(run.attempt)
        add_figures(run.work.trial, {str(run.attempt.number): figures}, run.work.ranks, facts)
        self.rows.refresh(run.work.number)

    def _hours(self, seat: Seat, seconds: float) -> float:
        """Return the node-hours of a trial; of a node that it shares, its part."""
        return seconds / 3600 * self.nodes.share_of_nodes(seat)

    def _node_hours(self) -> float:
        now = time.monotonic()
        running = sum(self._hours(run.seat, now - run.begun) for run in self._running.values())
        return running + sum(row.node_hours for row in self.rows.by_number)

    # The beginning and the end

    def _settle_old_attempts(self) -> None:
        """Store how trials ended while no runner ran; all others remain to be run again."""
        for found in self.study.get_trials(deepcopy=False):
            if found.state.name == "RUNNING" and self.search.is_paused(found):
                add_old_figures(self.search.trial_of(found), self.opened.trial(found.number))
                self.rows.refresh(found.number)
        for found in list(self.search.interrupted):
            folder = self.opened.trial(found.number)
            attempts = folder.attempts()
            if not attempts:
                continue
            self._check_ended(found.number, folder)
            work = self.search.work(self.search.trial_of(found))
            add_old_figures(work.trial, folder)
            outcome, end = self.outcomes.missed(work, folder, attempts), attempts[-1].end()
            if outcome is None:
                if end is None or end.code in INTERRUPTED_CODES:
                    continue
                outcome = self.outcomes.settle(work, folder, attempts[-1], end.code)
            self.search.interrupted.remove(found)
            if outcome is None:
                self._waiting.append(work)
            else:
                self._tell(work, outcome)

    def _check_ended(self, number: int, folder: TrialFolder) -> None:
        """Wait until no process of the last attempt at a trial runs.

        Raises:
            StudyStoppedError: There still is one.
        """
        for last in folder.attempts()[-1:]:
            if not last.wait_until_ended(OLD_ATTEMPT_TIMEOUT_S):
                raise StudyStoppedError(
                    f"processes of trial {number} of an earlier attempt still run. HINT: end those "
                    f"that hold {last.lock} (fuser -v)"
                )

    def _end_all(self, why: str) -> None:
        """Have all trials write a checkpoint and end; they are continued with the study."""
        for run in self._running.values():
            if not run.ending:
                run.ending = "interrupted"
                self._signal(run, signal.SIGTERM)
        if (
            why == "time"
            and not self._ended_here
            and not any(row.values or row.step is not None for row in self.rows.by_number)
        ):
            self.listener.message(
                f"the time was over before one trial ended. HINT: minutes = "
                f"{2 * (self.table.minutes or 1):g} or more"
            )

    def _interrupt_all(self) -> None:
        """End all trials after an error; their outcome is not stored."""
        limit = time.monotonic() + END_TIMEOUT_S
        try:
            for number in self._running:
                self.server.signal(number, signal.SIGTERM)
            while self._running and time.monotonic() < limit:
                for number, _ in self.server.ended(MIN_POLL_S):
                    self._running.pop(number, None)
        except ValueError:
            pass  # the server has ended, and the trials with it

    # What is shown

    def view(self) -> TuningView:
        """Return the current view of the study; its rows change with the study."""
        now = time.monotonic()
        return replace(
            self.rows.view(),
            running={run.work.number: now - run.begun for run in self._running.values()},
            next_text=self.search.next_text(),
            left_s=self._left_s(),
            elapsed_s=now - self._began,
        )

    def _left_s(self) -> float | None:
        """Return the estimated time until the budget is used; None if it is not known."""
        limits = [] if self.deadline is None else [self.deadline.left_s]
        most = min(self.table.trials, self.search.points or self.table.trials)
        more = most - self.search.count + len(self._running)
        if self._ended_here and more > 0:
            limits.append((time.monotonic() - self._began) / self._ended_here * more)
        return min(limits, default=None)


@dataclass(frozen=True)
class TuneOptions:
    """What the user asks for.

    Attributes:
        continued, forked: Whether to continue the study, or to begin a fork.
        minutes: Time budget, instead of that of the file.
        nodes: The options that choose the nodes.
        stage: Absolute paths of the packed datasets to stage.
    """

    continued: bool = False
    forked: bool = False
    minutes: float | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    stage: Sequence[str] = ()


@dataclass(frozen=True)
class TuneEnd:
    """How ``tune`` ended: the study, and whether it is complete."""

    view: TuningView
    is_complete: bool


def load_spec(path: Path) -> StudySpec:
    """Read a study file, and check that its search exists. Raises ValueError, OSError."""
    check_installed()
    if path.suffix != ".toml":
        raise ValueError(
            f"{path} is no study file: its name must end in .toml. HINT: write a "
            f'study file with command = "{path.name} ..." and the parameters: '
            "docs/how-to/improve/tune.md"
        )
    spec = read_study_file(path)
    try:
        check_search(spec)
    except ValueError as mistake:
        raise ValueError(f"{path}: {mistake}") from None
    return spec


def show_study(path: Path) -> tuple[OpenStudy, TuningView]:
    """Return the last study of a file, and its view in the journal. Raises ValueError, OSError."""
    opened = read_study(load_spec(path))
    return opened, read_view(opened)


def tune(
    path: Path, options: TuneOptions, listener: TuneListener, interrupted: Callable[[], bool]
) -> TuneEnd:
    """Run a study.

    Args:
        path: The study file.
        options: What the user asks for.
        listener: Receives what happens.
        interrupted: Returns whether the user asks to end.

    Raises:
        ValueError: The study can't be run, or can't go on.
        OSError: A file can't be read.
    """
    if VARIABLE in os.environ:
        raise ValueError(
            "paceline tune was started by a trial of another study. HINT: start it from a shell"
        )
    spec = load_spec(path)
    nodes = find_trial_nodes(options.nodes, spec.table.cores)
    for ranks in search_class(spec).numbers_of_ranks(spec):
        nodes.check(ranks)
    with contextlib.chdir(spec.folder):
        modules = _check_script(spec)
    with full_disk_in_words(spec.path), locked(spec, listener.message):
        server = TrialServer(modules)
        begin = continue_study if options.continued else begin_study
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Optuna calls experimental
                opened = (fork_study if options.forked else begin)(spec, listener.message)
                runner = Runner(
                    opened,
                    make_search(opened.study, spec),
                    nodes,
                    server,
                    listener,
                    options.minutes or spec.table.minutes,
                    interrupted,
                    options.stage,
                )
                complete = runner.run()
            return TuneEnd(read_view(opened, with_importances=complete), complete)
        finally:
            server.close()


def _check_script(spec: StudySpec) -> list[str]:
    """Return the modules to import once for all trials. Raises ValueError: there is no script."""
    words = spec.words({parameter.name: parameter.example for parameter in spec.parameters}, {})
    if spec.command.function:
        where = spec.command.function.rpartition(":")[0]
        words = [where] if where.endswith(".py") else ["-m", where]
    is_module = words[0] == "-m"
    job = Job(name=words[is_module], module=is_module)
    return preloads(job, check(job))
