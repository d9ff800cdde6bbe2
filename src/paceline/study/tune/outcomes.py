"""How a run of a trial ended: from its exit code, its output and what it has reported."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ...record.trial_reports import Report, read_from
from ...report.verdict.verdict import UNCERTAIN
from ...security.files import InvalidFileError
from ...security.schema import read_json
from ...security.text import printable
from ..script_runs.run_process import error_line, last_lines
from .searches.search import RUN_FIGURES, Failure
from .study_file import BEST, MAX, NODE_HOURS, SECONDS, StudySpec
from .trial_folder import Attempt, End, TrialFolder

if TYPE_CHECKING:
    from optuna.trial import Trial

# Kinds of failures.
(
    OUT_OF_MEMORY,
    DIVERGED,
    CRASHED,
    HUNG,
    LOST_NODE,
    TIME_LIMIT,
    NO_METRIC,
    NO_CHECKPOINT,
    FULL_DISK,
) = (
    *("out of memory", "diverged", "crashed", "hung", "lost node"),
    *("time limit", "no metric", "no checkpoint", "full disk"),
)
KINDS = (OUT_OF_MEMORY, DIVERGED, CRASHED, HUNG, LOST_NODE, TIME_LIMIT, NO_METRIC, NO_CHECKPOINT)
REPEATED = (HUNG, LOST_NODE)  # are run once more: the next attempt may go well
STOPPED_EARLY, HANG = 75, 124  # exit codes of ``paceline run``
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
    (
        DIVERGED,
        re.compile(r"\b(loss|gradient)\b.*\b(is|was|are) (not finite|nan|-?inf)\b", re.I),
    ),
)


# What the summary of a trial's run tells: what it waited for, and its gradient noise scale.

MAX_SUMMARY_BYTES = 16 << 20
MIN_SHARE = 0.1  # of the ranks' time; a smaller loss is not named
# What waits, by the kind of a loss in a summary.
INPUT, EXCHANGE, CORES = "input", "exchange", "cores"
_WAITS = {
    "input": INPUT,
    "wait": EXCHANGE,
    "transfer": EXCHANGE,
    "bubble": EXCHANGE,
    "starved": CORES,
}


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
    kind = max(shares, key=lambda one: shares[one], default="")
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
                matched = _match(self._pattern, line, before + self._count)
                self._count += len(matched)
                found += matched
        return found


def _match(pattern: re.Pattern[str], line: bytes, before: int) -> list[tuple[int, float]]:
    match = pattern.search(line[:10_000].decode(errors="replace"))
    if match is None:
        return []
    groups = match.groupdict()
    text = groups.get("value") or next(
        (one for one in match.groups() if one is not None and one != groups.get("step")), None
    )
    try:
        value = float(text or match[0])
        step = int(groups["step"]) if groups.get("step") else before + 1
    except ValueError:
        return []
    return [(step, value)]


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
    told = error_line(last) or (last[-1].strip() if last else "")
    reason = told or f"exit code {code}"
    if (found := reported.nonfinite) is not None:
        name, step, value = found
        return Failure(DIVERGED, f"{name} is {value} at step {step}")
    if code == HANG:
        return Failure(HUNG, f"{reason}\n{text}")
    for kind, pattern in _SIGNS:
        line = next((one for one in last if pattern.search(one)), None)
        if line is not None:
            return Failure(kind, f"{line.strip()}\n{text}")
    if free_bytes(attempt.folder) < FULL_BYTES:  # it may not even have printed its error
        return Failure(FULL_DISK, f"{attempt.folder} has no space left; {reason}\n{text}")
    return Failure(CRASHED, f"{reason} (exit code {code})\n{text}")


def free_bytes(folder: Path) -> float:
    """Return the free space of a file system for this user; infinite if it is unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return math.inf
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else math.inf


def good_attempts(folder: TrialFolder) -> list[Attempt]:
    """Return the attempts that went to the end of the script."""
    ends: list[tuple[Attempt, End | None]] = [(one, one.end()) for one in folder.attempts()]
    return [one for one, end in ends if end is not None and end.code == 0]


def add_figures(
    trial: "Trial",
    added: dict[str, list[float]],
    ranks: int | None = None,
    facts: dict[str, Any] | None = None,
) -> None:
    """Store seconds and node-hours of attempts; those that are stored already count once.

    Args:
        trial: The trial.
        added: The figures by the number of the attempt.
        ranks: Number of ranks of the last attempt; None: as before.
        facts: What the summary of the last attempt tells; None: as before.
    """
    before = trial.user_attrs.get(RUN_FIGURES, {})
    attempts = {**added, **before.get("attempts", {})}
    figures = {
        **before,
        **(facts or {}),
        "ranks": ranks or before.get("ranks", 1),
        "seconds": sum(one[0] for one in attempts.values()),
        "node_hours": sum(one[1] for one in attempts.values()),
        "attempts": attempts,
    }
    if figures != before and attempts:
        trial.set_user_attr(RUN_FIGURES, figures)


def add_old_figures(trial: "Trial", folder: TrialFolder) -> None:
    """Store the figures of attempts that ended while no runner ran."""
    ends = [(str(one.number), one.end()) for one in folder.attempts()]
    found = {
        number: [end.seconds, end.seconds / 3600 * end.nodes]
        for number, end in ends
        if end is not None
    }
    add_figures(trial, found)
