"""The runner of a study: it starts trials where there is room, and asks the search about them.

All that it knows is in the journal and in the folders of the trials, so it may be killed at any
moment: ``run`` of a new runner continues. A trial that ran is run again under its number, from its
checkpoint if it has one; one that had ended meanwhile is not.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ...launch.remote.forwarded_env import parse_env_options
from ...record.trial_reports import VARIABLE, LineReader, Report, TrialRequest, read_lines
from ...report.tuning.tuning_view import COMPLETE, MAX, TrialRow, TuneListener, TuningView
from ..script_runs.deadline import MINUTE_S, Deadline
from .command import CHECKPOINT, EPOCHS, FOLDER, RANKS, SEED, TRIAL
from .machine import Machine, Seat
from .open_study import OpenStudy
from .searches.search import (
    RUN_FIGURES,
    Decision,
    Failure,
    MissedStepError,
    Outcome,
    Search,
    Work,
)
from .study_view import best_numbers, study_view, trial_row
from .trial_folder import (
    DIVERGED,
    FULL_DISK,
    LOST_NODE,
    NO_CHECKPOINT,
    NO_METRIC,
    REPEATED,
    STOPPED_EARLY,
    TIME_LIMIT,
    Attempt,
    PatternReader,
    Reported,
    TrialFolder,
    add_figures,
    add_old_figures,
    failure_of,
    gather,
    good_attempts,
    missing_metric,
    summary_facts,
    values_of,
)
from .trial_server import TrialServer, TrialStart

# Between two looks at the reports of the trials: not more often than a shared file system bears.
MIN_POLL_S, POLL_OF_TRIAL_S = 0.02, 0.005
END_TIMEOUT_S = 40.0  # for trials to write a checkpoint and end
OLD_ATTEMPT_TIMEOUT_S = 5.0  # for the processes of a runner that was killed
MAX_REPORTS_BYTES = 256 << 20
SAME_FAILURES = 3  # of the first trials: the study stops
SAME_DIVERGED = 10  # the same for diverged trials: many points of a wide range may
REPEATED_SHARE = 0.25  # of the trials, by the rule "best" for repeats
MAX_ATTEMPTS = 2  # at a trial that hung, or lost a node
INTERRUPTED_CODES = (STOPPED_EARLY, 129, 130, 143)  # Paceline or a scheduler has ended it


class StudyStoppedError(ValueError):
    """The study can't go on; the message says why."""


@dataclass
class TrialRun:
    """A trial that runs.

    Attributes:
        ending: Why the runner ends it: "", "paused", "stopped", "interrupted" or "failed".
        failure: If the runner ends it for a failure.
        signalled: Whether a signal was sent to end it.
        seen: Steps whose value was taken.
    """

    work: Work
    seat: Seat
    folder: TrialFolder
    attempt: Attempt
    reader: LineReader
    pattern: PatternReader | None
    begun: float
    ending: str = ""
    failure: Failure | None = None
    signalled: bool = False
    seen: set[int] = field(default_factory=set)


class Runner:
    """Runs the trials of a study.

    Args:
        opened: The study, of which the caller holds the lock.
        search: Its search.
        machine: Where trials run.
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
        machine: Machine,
        server: TrialServer,
        listener: TuneListener,
        minutes: float | None,
        interrupted: Callable[[], bool],
        stage: Sequence[str] = (),
    ) -> None:
        self.stage = stage
        self.opened, self.search, self.machine = opened, search, machine
        self.spec, self.study, self.table = opened.spec, opened.study, opened.spec.table
        self.server, self.listener, self.interrupted = server, listener, interrupted
        self.deadline = Deadline.after(minutes * MINUTE_S) if minutes else None
        self._began = time.monotonic()
        self._running: dict[int, TrialRun] = {}  # by number in the server
        self._started = 0
        self._waiting: list[Work] = []  # without a seat, or to be repeated
        self._failed_attempts: dict[int, int] = {}
        self._first_failures: list[str] | None = []
        self._rows: list[TrialRow] = []  # by number
        self._best: list[int] = []
        self._ended_here = 0
        self._cleared: set[int] = set()  # trials whose checkpoints were removed
        self._variables = parse_env_options(list(self.table.env))

    def run(self) -> bool:
        """Run the study; return whether it is complete.

        Raises:
            StudyStoppedError: It can't go on. All trials that ran are interrupted.
            OSError: A file can't be written.
        """
        self._refresh_all()
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
            self._refresh_all()
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
        return epochs is not None and sum(row.steps for row in self._rows) >= epochs

    def _fill(self) -> None:
        """Start trials while there is room."""
        most = self.table.side_by_side
        while most is None or len(self._running) < most:
            if self.machine.is_full:
                return
            if self._waiting:
                work: Work | None = self._waiting.pop(0)
            elif self._is_spent() and not self.search.interrupted:
                return
            else:
                work = self.search.ask(self.search.count < self.table.trials)
            if work is None:
                return
            seat = self.machine.take(work.ranks)
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
                self.machine.give_back(seat)
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
            self._started,
            self.spec.words(work.values, self._own_values(work, folder)),
            work.ranks,
            seat.share,
            str(self.spec.folder),
            str(attempt.output),
            str(attempt.end_file),
            str(attempt.lock),
            seat.hosts,
            self.machine.launcher if seat.hosts else None,
            {**self._variables, VARIABLE: msgspec.json.encode(request).decode()},
            self.table.hang_timeout,
            self.machine.share_of_nodes(seat),
            str(attempt.summary),
            list(self.stage),
            self.spec.knobs(work.values),
            parent,
        )
        self.search.running.add(work.number)
        self.server.start(start)
        pattern = self.spec.patterns.get(self.spec.reported[0])
        self._running[self._started] = TrialRun(
            work,
            seat,
            folder,
            attempt,
            LineReader(attempt.reports, Report),
            PatternReader(pattern, attempt.output) if pattern else None,
            time.monotonic(),
        )
        row = replace(self._refresh(work.number), ranks=work.ranks)
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
            self.machine.give_back(run.seat)
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
            self._refresh(run.work.number)
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
        for number, one in self._running.items():
            if one is run:
                self.server.signal(number, kind)

    def _ended(self, run: TrialRun, code: int) -> None:
        """Store how a run ended, or repeat it."""
        self.search.running.discard(run.work.number)
        self._store_figures(run)
        outcome = self._outcome(run, code)
        if outcome is not None:
            self._tell(run.work, outcome)

    def _outcome(self, run: TrialRun, code: int) -> Outcome | None:
        """Return how a run ended; None if its trial is run again."""
        number = run.work.number
        if run.ending == "stopped":
            return Outcome("stopped")
        if run.ending == "paused" and code in INTERRUPTED_CODES:
            if run.folder.has_checkpoint:
                return Outcome("paused")
            text = (
                f"it can't be promoted: after its rung there is no checkpoint in "
                f"{run.folder.checkpoint}. HINT: the script must save into {{checkpoint}} at the "
                "end of each epoch, before it reports the metric: world.epochs(checkpoint=...)"
            )
            return Outcome("failed", failure=Failure(NO_CHECKPOINT, text))
        if run.ending == "failed":
            return Outcome("failed", failure=run.failure)
        if run.ending == "interrupted" and code:
            return None
        if code == STOPPED_EARLY:
            raise StudyStoppedError(
                f"trial {number} was ended by the scheduler: its time limit is near. HINT: "
                f"continue in a new allocation: paceline tune {self.spec.path} --continue"
            )
        return self._settle(run.work, run.folder, run.attempt, code, run.seat)

    def _settle(
        self, work: Work, folder: TrialFolder, attempt: Attempt, code: int, seat: Seat | None = None
    ) -> Outcome | None:
        """Return the outcome of an attempt that ended by itself; None if the trial is run again."""
        good = good_attempts(folder)
        if code == 0 and self.search.has_reached_pause(work):
            return self._not_paused(work, folder)
        if code == 0:
            outcome = self._complete(work, folder, good)
            if len(good) < self.table.repeats and self._is_worth_repeating(outcome):
                self._waiting.append(work)
                return None
            return outcome
        failure = failure_of(attempt, code, self._reported(folder, [attempt]))
        if failure.kind == FULL_DISK and seat is None:  # of an earlier runner
            self._waiting.append(work)
            return None
        if failure.kind == FULL_DISK:
            attempt.forget_end()
            raise StudyStoppedError(
                f"trial {work.number} could not write: {failure.text.partition(chr(10))[0]}. All "
                f"trials that ended are in the journal. HINT: free some space, then paceline tune "
                f"{self.spec.path} --continue"
            )
        if (
            failure.kind == LOST_NODE
            and seat is not None
            and (node := self.machine.leave_out(seat))
        ):
            self.listener.message(f"{node} is lost, and no further trial starts there")
            self.machine.check(work.ranks)
        if not self._fails_again(work) and failure.kind in REPEATED:
            self.listener.message(f"trial {work.number}: {failure.kind}; it is run once more")
            self._waiting.append(work)
            return None
        return Outcome("failed", failure=failure)

    def _not_paused(self, work: Work, folder: TrialFolder) -> Outcome | None:
        """Repeat a trial that has trained to the end of the script instead of pausing."""
        self._forget_checkpoint(work, folder)
        text = "it trained on after the step at which it pauses"
        if self._fails_again(work):
            failure = (
                f"{text}, so it has no checkpoint of that step. HINT: the runner has 60 s to "
                "answer a report; it takes longer where checkpoints are large and the file system "
                "is slow. A script whose output has the metric (patterns) does not wait: report it "
                "with world.log"
            )
            return Outcome("failed", failure=Failure(NO_CHECKPOINT, failure))
        self.listener.message(f"trial {work.number}: {text}; it is run once more")
        self._waiting.append(work)
        return None

    def _fails_again(self, work: Work) -> bool:
        """Count a failed attempt at a trial; return whether it is the last one."""
        failed = self._failed_attempts[work.number] = self._failed_attempts.get(work.number, 0) + 1
        return failed >= MAX_ATTEMPTS

    def _is_worth_repeating(self, outcome: Outcome) -> bool:
        """Return whether a trial that is noisy is run once more.

        By the rule "best" it is, as long as the mean of its runs is among the best complete trials.
        """
        if self.table.repeat == "all" or outcome.state != "complete":
            return self.table.repeat == "all"
        sign = -1 if self.spec.goals[0] == MAX else 1
        others = [sign * row.values[0] for row in self._rows if row.state == COMPLETE]
        better = sum(value < sign * outcome.values[0] for value in others)
        return better < max((len(others) + 1) * REPEATED_SHARE, 1)

    def _complete(self, work: Work, folder: TrialFolder, good: list[Attempt]) -> Outcome:
        figures = work.trial.user_attrs.get(RUN_FIGURES, {})
        seconds, hours = figures.get("seconds", 0.0), figures.get("node_hours", 0.0)
        # Attempts that were paused or interrupted belong to the one that went to the end.
        groups = [[one] for one in good] if self.table.repeats > 1 else [folder.attempts()]
        found = []
        for attempts in groups:
            reported = self._reported(folder, attempts)
            if (bad := reported.nonfinite) is not None:
                return Outcome(
                    "failed", failure=Failure(DIVERGED, f"{bad[0]} is {bad[2]} at step {bad[1]}")
                )
            values = values_of(self.spec, reported, seconds, hours)
            if values is None:
                text = missing_metric(self.spec, reported)
                return Outcome("failed", failure=Failure(NO_METRIC, text))
            found.append(values)
        return Outcome("complete", [statistics.fmean(each) for each in zip(*found, strict=True)])

    def _reported(self, folder: TrialFolder, attempts: list[Attempt]) -> Reported:
        reports: list[Report] = []
        for attempt in attempts:
            reports += read_lines(attempt.reports, Report, MAX_REPORTS_BYTES)
        return gather(self.spec, attempts, reports)

    def _tell(self, work: Work, outcome: Outcome) -> None:
        self.search.tell(work, outcome)
        self._ended_here += 1
        self.listener.trial_ended(self._refresh(work.number), self.view())
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
        self._refresh(run.work.number)

    def _hours(self, seat: Seat, seconds: float) -> float:
        """Return the node-hours of a trial; of a node that it shares, its part."""
        return seconds / 3600 * self.machine.share_of_nodes(seat)

    def _node_hours(self) -> float:
        now = time.monotonic()
        running = sum(self._hours(run.seat, now - run.begun) for run in self._running.values())
        return running + sum(row.node_hours for row in self._rows)

    # The beginning and the end

    def _settle_old_attempts(self) -> None:
        """Store how trials ended while no runner ran; all others remain to be run again."""
        for found in self.study.get_trials(deepcopy=False):
            if found.state.name == "RUNNING" and self.search.is_paused(found):
                add_old_figures(self.search.trial_of(found), self.opened.trial(found.number))
                self._refresh(found.number)
        for found in list(self.search.interrupted):
            folder = self.opened.trial(found.number)
            attempts = folder.attempts()
            if not attempts:
                continue
            self._check_ended(found.number, folder)
            work = self.search.work(self.search.trial_of(found))
            add_old_figures(work.trial, folder)
            outcome, end = self._missed(work, folder, attempts), attempts[-1].end()
            if outcome is None and end is not None and end.code not in INTERRUPTED_CODES:
                outcome = self._settle(work, folder, attempts[-1], end.code)
                if outcome is None:  # it waits to be run again
                    self.search.interrupted.remove(found)
            if outcome is not None:
                self.search.interrupted.remove(found)
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

    def _missed(self, work: Work, folder: TrialFolder, attempts: list[Attempt]) -> Outcome | None:
        """Take the reports that the last runner had not stored; return whether they end the run."""
        if len(self.spec.metrics) > 1:
            return None
        for step, value in self._reported(folder, attempts).series[self.spec.reported[0]]:
            if value - value != 0:
                return None  # it is found again
            try:
                decision = self.search.report(work, step, value)
            except MissedStepError as error:
                return Outcome("failed", failure=Failure(NO_METRIC, str(error)))
            if decision == Decision.STOP:
                return Outcome("stopped")
            if decision == Decision.PAUSE:
                return self._paused(work, folder, attempts[-1])
        return None

    def _paused(self, work: Work, folder: TrialFolder, last: Attempt) -> Outcome | None:
        """Return the outcome of a trial that reached the step at which it pauses, without a runner.

        Other trials may begin from its checkpoint, which must be that of this step. One that has
        not ended by itself may have written it or not: it is trained again from its beginning.
        """
        end = last.end()
        if not self.search.exchanges or (end is not None and end.code in INTERRUPTED_CODES):
            return Outcome("paused")
        self._forget_checkpoint(work, folder)
        return None

    def _forget_checkpoint(self, work: Work, folder: TrialFolder) -> None:
        """Remove a checkpoint that may be of another step than that of the pause."""
        if not folder.remove_checkpoint():
            raise StudyStoppedError(
                f"the checkpoint of trial {work.number} can't be removed, and it is not known of "
                f"which step it is. HINT: rm -r {folder.checkpoint}, then paceline tune "
                f"{self.spec.path} --continue"
            )

    def _end_all(self, why: str) -> None:
        """Have all trials write a checkpoint and end; they are continued with the study."""
        for run in self._running.values():
            if not run.ending:
                run.ending = "interrupted"
                self._signal(run, signal.SIGTERM)
        if why == "time" and not self._ended_here and not self._rows_with_values():
            self.listener.message(
                f"the time was over before one trial ended. HINT: minutes = "
                f"{2 * (self.table.minutes or 1):g} or more"
            )

    def _rows_with_values(self) -> int:
        return sum(bool(row.values) or row.step is not None for row in self._rows)

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

    def _refresh(self, number: int) -> TrialRow:
        """Read the row of a trial again."""
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials[len(self._rows) :]:
            self._rows.append(trial_row(trial, self.search))
        row = self._rows[number] = trial_row(trials[number], self.search)
        if row.state == COMPLETE:
            several = len(self.spec.metrics) > 1
            rows = self._rows if several else [*map(self._rows.__getitem__, self._best), row]
            self._best = best_numbers(self.study, rows)
        return row

    def _refresh_all(self) -> None:
        trials = self.study.get_trials(deepcopy=False)
        self._rows = [trial_row(trial, self.search) for trial in trials]
        self._best = best_numbers(self.study, self._rows)

    def view(self) -> TuningView:
        """Return the study as it is now; its rows change with the study."""
        now = time.monotonic()
        return replace(
            study_view(self.opened, self._rows, self._best),
            running={run.work.number: now - run.begun for run in self._running.values()},
            next_text=self.search.next_text(),
            left_s=self._left_s(),
            elapsed_s=now - self._began,
        )

    def _left_s(self) -> float | None:
        """Return the time until the budget is used, as far as it is known."""
        limits = [] if self.deadline is None else [self.deadline.left_s]
        most = min(self.table.trials, self.search.points or self.table.trials)
        more = most - self.search.count + len(self._running)
        if self._ended_here and more > 0:
            limits.append((time.monotonic() - self._began) / self._ended_here * more)
        return min(limits, default=None)


def environment_is_clean() -> None:
    """Raise ValueError if this process is a trial itself."""
    if VARIABLE in os.environ:
        raise ValueError(
            "paceline tune was started by a trial of another study. HINT: start it from a shell"
        )
