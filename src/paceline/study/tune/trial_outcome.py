"""How a run of a trial ended: from its exit code, its output, its summary and what it reported."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...record.trial_reports import LineReader, Report, read_from, read_lines
from ...report.tuning.tuning_view import COMPLETE
from ...report.verdict import UNCERTAIN
from ...security.files import InvalidFileError
from ...security.schema import read_json
from ...security.text import printable
from ..probe.measure.host_facts import free_space
from ..script_runs.run_process import error_line, last_lines
from ..study_nodes import Seat, TrialNodes
from .searches.search import RUN_FIGURES, Decision, Failure, MissedStepError, Outcome, Search, Work
from .study_file import BEST, MAX, NODE_HOURS, SECONDS, StudySpec
from .study_view import StudyRows
from .trial_folder import Attempt, TrialFolder, good_attempts

# Kinds of failures.
OUT_OF_MEMORY, DIVERGED, CRASHED = "out of memory", "diverged", "crashed"
HUNG, LOST_NODE, TIME_LIMIT = "hung", "lost node", "time limit"
NO_METRIC, NO_CHECKPOINT, FULL_DISK = "no metric", "no checkpoint", "full disk"
REPEATED = (HUNG, LOST_NODE)  # are run once more: the next attempt may go well
STOPPED_EARLY, HANG = 75, 124  # exit codes of ``paceline run``
MAX_LINE_BYTES = 10_000  # of a line, that are searched
FULL_BYTES = 1 << 20  # free space of a file system with which a failure is taken for its fault
LINES, SHOWN_LINES = 60, 6  # at the end of the output, that are searched and shown
# What a line of the output says, the surest sign first. A line that names several ranks' ends is of
# ``launch.monitor.failures``; "probably out of memory" there is a guess.
_SIGNS = (
    (FULL_DISK, re.compile(r"No space left on device|Disk quota exceeded")),
    (LOST_NODE, re.compile(r"paceline: rank \d+( on \S+)? was lost")),
    (
        OUT_OF_MEMORY,
        re.compile(
            r"(?<!probably )out of memory|OutOfMemoryError|\bMemoryError|[Cc]annot allocate memory"
        ),
    ),
    (DIVERGED, re.compile(r"\b(loss|gradient)\b.*\b(is|was|are) (not finite|nan|-?inf)\b", re.I)),
)


# What the summary of a trial's run tells: what it waited for, and its gradient noise scale.

MAX_SUMMARY_BYTES = 16 << 20
MIN_SHARE = 0.1  # of the ranks' time; a smaller loss is not named
# What waits, by the kind of a loss in a summary.
_WAITS = {"input": "input", "starved": "cores"} | dict.fromkeys(
    ("wait", "transfer", "bubble"), "exchange"
)


class _Loss(msgspec.Struct, frozen=True):
    kind: Annotated[str, Meta(max_length=100)]
    share: Annotated[float, Meta(ge=0, le=1)]


class _Verdict(msgspec.Struct, frozen=True):
    verdict: Annotated[str, Meta(max_length=10_000)] = ""


class _Noise(msgspec.Struct, frozen=True):
    samples: float | None = None
    low: float = 0.0
    high: float | None = None


class _Summary(msgspec.Struct, frozen=True):
    """The part of a summary that is read. A run without figures has none of it."""

    losses: Annotated[list[_Loss], Meta(max_length=10_000)] = []
    verdict: _Verdict = _Verdict()
    noise_scale: _Noise | None = None


def summary_facts(attempt: Attempt) -> dict[str, Any]:
    """Return what a run waited for longest, and its gradient noise scale, as far as they are known.

    ``waits``: kind and share of the ranks' time, if it is at least ``MIN_SHARE`` and the summary is
    not uncertain. ``noise``: samples, and its interval.
    """
    try:
        summary = read_json(attempt.summary, _Summary, MAX_SUMMARY_BYTES)
    except (OSError, InvalidFileError):
        return {}
    found: dict[str, Any] = {}
    noise = summary.noise_scale
    if noise is not None and noise.samples is not None and noise.high is not None:
        found["noise"] = [noise.samples, noise.low, noise.high]
    shares: dict[str, float] = {}
    for loss in summary.losses:
        if loss.kind in _WAITS:
            kind = _WAITS[loss.kind]
            shares[kind] = shares.get(kind, 0.0) + loss.share
    kind = max(shares, key=lambda kind: shares[kind], default="")
    is_sure = not summary.verdict.verdict.startswith(UNCERTAIN)
    if is_sure and shares.get(kind, 0.0) >= MIN_SHARE:
        found["waits"] = {"kind": kind, "share": round(shares[kind], 4)}
    return found


@dataclass(frozen=True)
class Reported:
    """The values that all attempts at a trial have reported, in their order.

    Attributes:
        series: By metric: pairs of step and value.
        others: Names of other values.
    """

    series: dict[str, list[tuple[int, float]]]
    others: set[str]

    @property
    def nonfinite(self) -> tuple[str, int, float] | None:
        """The first metric that is not finite, with step and value."""
        for name, pairs in self.series.items():
            for step, value in pairs:
                if not math.isfinite(value):
                    return name, step, value
        return None


def gather(spec: StudySpec, attempts: Sequence[Attempt], reports: Sequence[Report]) -> Reported:
    """Return what a trial has reported, also by its output."""
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in spec.reported}
    others: set[str] = set()
    for report in reports:
        for name, value in report.values.items():
            if name in spec.patterns:
                continue
            if name in series:
                series[name].append((report.step, float(value)))
            else:
                others.add(name)
    for name, pattern in spec.patterns.items():
        for attempt in attempts:
            series[name] += PatternReader(pattern, attempt.output).read(len(series[name]))
    return Reported(series, others)


class PatternReader:
    """Finds the values of a regular expression in the output of an attempt, as it grows.

    The step is the group ``step`` if there is one, else the number of the match.
    """

    def __init__(self, pattern: str, output: Path) -> None:
        self._pattern, self._output = re.compile(pattern), output
        self._offset, self._count, self._rest = 0, 0, b""

    def read(self, before: int = 0) -> list[tuple[int, float]]:
        """Return the new pairs of step and value.

        Args:
            before: Number of matches in earlier attempts.
        """
        found: list[tuple[int, float]] = []
        while data := read_from(self._output, self._offset):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                matched = self._pattern.search(line[:MAX_LINE_BYTES].decode(errors="replace"))
                if matched and (pair := _read_match(matched, before + self._count + 1)):
                    self._count += 1
                    found.append(pair)
            self._rest = self._rest[:MAX_LINE_BYTES]  # a progress bar writes one line for hours
        return found


def _read_match(match: re.Match[str], number: int) -> tuple[int, float] | None:
    """Return step and value of a match of this number; None if they are no numbers."""
    groups = match.groupdict()
    text = groups.get("value") or next(
        (group for group in match.groups() if group is not None and group != groups.get("step")), ""
    )
    try:
        return int(groups.get("step") or number), float(text or match[0])
    except ValueError:
        return None


def values_of(
    spec: StudySpec, reported: Reported, seconds: float, hours: float
) -> list[float] | None:
    """Return the value of each metric; None if one of them was never reported."""
    found = []
    for name, goal in zip(spec.metrics, spec.goals, strict=True):
        if name in (SECONDS, NODE_HOURS):
            found.append(seconds if name == SECONDS else hours)
            continue
        values = [value for _, value in reported.series[name]]
        if not values:
            return None
        best = max if goal == MAX else min
        found.append(best(values) if spec.table.value == BEST else values[-1])
    return found


def missing_metric(spec: StudySpec, reported: Reported) -> str:
    """Return a sentence about the metrics that a trial has not reported."""
    missing = [name for name in spec.reported if not reported.series[name]]
    name = missing[0]
    if name in spec.patterns:
        return (
            f"no line of its output matches patterns.{name} = {spec.patterns[name]!r}. HINT: "
            "the output is in the folder of the trial"
        )
    if reported.others:
        known = ", ".join(sorted(reported.others)[:10])
        return f"it never reported {name}. It reported {known}. HINT: study.metric = one of these"
    return (
        f"it never reported {name}. HINT: world.log({name}=...) or paceline.tune.report(value, "
        f"step) in the script, or a regular expression for its output: patterns.{name}"
    )


def failure_of(attempt: Attempt, code: int, reported: Reported) -> Failure:
    """Return why an attempt with this exit code failed."""
    try:
        last = last_lines(attempt.output, LINES)
    except OSError:
        last = []
    text = "\n".join(printable(line) for line in last[-SHOWN_LINES:])
    reason = error_line(last) or (last[-1].strip() if last else "") or f"exit code {code}"
    if (found := reported.nonfinite) is not None:
        name, step, value = found
        return Failure(DIVERGED, f"{name} is {value} at step {step}")
    if code == HANG:
        return Failure(HUNG, f"{reason}\n{text}")
    for kind, pattern in _SIGNS:
        line = next((line for line in last if pattern.search(line)), None)
        if line is not None:
            return Failure(kind, f"{line.strip()}\n{text}")
    free = free_space(attempt.folder)
    if free is not None and free < FULL_BYTES:  # it may not even have printed its error
        return Failure(FULL_DISK, f"{attempt.folder} has no space left; {reason}\n{text}")
    return Failure(CRASHED, f"{reason} (exit code {code})\n{text}")


# What the end of an attempt means for its trial.

MAX_REPORTS_BYTES = 256 << 20
REPEATED_SHARE = 0.25  # of the trials, by the rule "best" for repeats
MAX_ATTEMPTS = 2  # at a trial that hung, or lost a node
INTERRUPTED_CODES = (STOPPED_EARLY, 129, 130, 143)  # Paceline or a scheduler has ended it


class StudyStoppedError(ValueError):
    """The study can't go on; the message says why."""


@dataclass
class TrialRun:
    """A trial that runs.

    Attributes:
        number: Number of the attempt, in the server.
        ending: Why the runner ends it: "", "paused", "stopped", "interrupted" or "failed".
        failure: If the runner ends it for a failure.
        signalled: Whether a signal was sent to end it.
        seen: Steps whose value was taken.
    """

    number: int
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


class TrialOutcomes:
    """Decides what the end of an attempt at a trial means.

    Args:
        spec: The study file.
        search: The search of the study.
        nodes: Where trials run; lost nodes are left out.
        rows: The rows of all trials.
        say: Receives what happens.
    """

    def __init__(
        self,
        spec: StudySpec,
        search: Search,
        nodes: TrialNodes,
        rows: StudyRows,
        say: Callable[[str], None],
    ) -> None:
        self.spec, self.table, self.search = spec, spec.table, search
        self.nodes, self.rows, self.say = nodes, rows, say
        self._failed_attempts: dict[int, int] = {}

    def outcome(self, run: TrialRun, code: int) -> Outcome | None:
        """Return how a run that was not interrupted has ended; None if its trial is run again.

        Raises:
            StudyStoppedError: The study can't go on.
        """
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
        if code == STOPPED_EARLY:
            raise StudyStoppedError(
                f"trial {run.work.number} was ended by the scheduler: its time limit is near. "
                f"HINT: continue in a new allocation: paceline tune {self.spec.path} --continue"
            )
        return self.settle(run.work, run.folder, run.attempt, code, run.seat)

    def settle(
        self, work: Work, folder: TrialFolder, attempt: Attempt, code: int, seat: Seat | None = None
    ) -> Outcome | None:
        """Return the outcome of an attempt that the runner has not ended; None: it is run again."""
        good = good_attempts(folder)
        if code == 0 and self.search.has_reached_pause(work):
            return self._not_paused(work, folder)
        if code == 0:
            outcome = self._complete(work, folder, good)
            more = len(good) < self.table.repeats and self._is_worth_repeating(outcome)
            return None if more else outcome
        failure = failure_of(attempt, code, self._reported([attempt]))
        if failure.kind == FULL_DISK and seat is None:  # of an earlier runner
            return None
        if failure.kind == FULL_DISK:
            attempt.forget_end()
            raise StudyStoppedError(
                f"trial {work.number} could not write: {failure.text.partition(chr(10))[0]}. All "
                f"trials that ended are in the journal. HINT: free some space, then paceline tune "
                f"{self.spec.path} --continue"
            )
        if failure.kind == LOST_NODE and seat is not None and (node := self.nodes.leave_out(seat)):
            self.say(f"{node} is lost, and no further trial starts there")
            self.nodes.check(work.ranks)
        if not self._fails_again(work) and failure.kind in REPEATED:
            self.say(f"trial {work.number}: {failure.kind}; it is run once more")
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
        self.say(f"trial {work.number}: {text}; it is run once more")
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
        others = [sign * row.values[0] for row in self.rows.by_number if row.state == COMPLETE]
        better = sum(value < sign * outcome.values[0] for value in others)
        return better < max((len(others) + 1) * REPEATED_SHARE, 1)

    def _complete(self, work: Work, folder: TrialFolder, good: list[Attempt]) -> Outcome:
        figures = work.trial.user_attrs.get(RUN_FIGURES, {})
        seconds, hours = figures.get("seconds", 0.0), figures.get("node_hours", 0.0)
        # Attempts that were paused or interrupted belong to the one that went to the end.
        groups = [[attempt] for attempt in good] if self.table.repeats > 1 else [folder.attempts()]
        found = []
        for attempts in groups:
            reported = self._reported(attempts)
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

    def _reported(self, attempts: list[Attempt]) -> Reported:
        reports: list[Report] = []
        for attempt in attempts:
            reports += read_lines(attempt.reports, Report, MAX_REPORTS_BYTES)
        return gather(self.spec, attempts, reports)

    def missed(self, work: Work, folder: TrialFolder, attempts: list[Attempt]) -> Outcome | None:
        """Take the reports that the last runner had not stored; return whether they end the run."""
        if len(self.spec.metrics) > 1:
            return None
        for step, value in self._reported(attempts).series[self.spec.reported[0]]:
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

        Other trials may begin from its checkpoint, which must be that of this step. If the attempt
        was killed, that is not known: the trial is trained again from its beginning.
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
