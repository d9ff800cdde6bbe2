"""The folder of a trial (output, reports, answers and checkpoint), and how its runs ended.

Each attempt at a trial has files of its own: a process of an earlier attempt that has not ended yet
does not write into those of the next one.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ...record.trial_reports import Answer, Report, read_from
from ...report.verdict import UNCERTAIN
from ...security.files import InvalidFileError, open_regular
from ...security.removal import REMOVED_PREFIX, TemporaryFolder, remove_from_marked
from ...security.schema import read_json
from ...security.text import printable
from ..probe.measure.host_facts import free_space
from ..script_runs.run_process import error_line, last_lines
from ..study_folder import make_marked
from .searches.search import RUN_FIGURES, Failure
from .study_file import BEST, MAX, NODE_HOURS, SECONDS, StudySpec

if TYPE_CHECKING:
    from optuna.trial import Trial

CHECKPOINT = "checkpoint"
COPY_PREFIX = ".checkpoint-"  # of a folder in which a copy of a checkpoint begins
MARK = "trial of a study"
MAX_END_BYTES = 1 << 16
POLL_S = 0.02
_ATTEMPT = re.compile(r"attempt-(\d{1,6})\.lock")


class End(msgspec.Struct, frozen=True):
    """How an attempt ended: written by its launcher.

    Attributes:
        code: Exit code of ``paceline run``.
        seconds: Wall time.
        nodes: Number of nodes; of one that it shares, its part.
    """

    code: Annotated[int, Meta(ge=-1000, le=1000)]
    seconds: Annotated[float, Meta(ge=0)]
    nodes: Annotated[float, Meta(ge=0)] = 1.0


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt at a trial."""

    folder: Path
    number: int

    def _file(self, name: str) -> Path:
        return self.folder / f"attempt-{self.number}.{name}"

    @property
    def lock(self) -> Path:
        """Held by all processes of the attempt on the runner's node."""
        return self._file("lock")

    @property
    def output(self) -> Path:
        return self._file("out")

    @property
    def reports(self) -> Path:
        return self._file("reports")

    @property
    def answers(self) -> Path:
        return self._file("answers")

    @property
    def summary(self) -> Path:
        return self._file("summary")

    @property
    def end_file(self) -> Path:
        return self._file("end")

    def end(self) -> End | None:
        """Return how it ended; None if it has not, or its launcher was killed."""
        try:
            return read_json(self.end_file, End, MAX_END_BYTES)
        except (FileNotFoundError, InvalidFileError):
            return None

    def forget_end(self) -> None:
        """Let the attempt count as interrupted: the trial is run again."""
        self.end_file.unlink(missing_ok=True)

    def answer(self, step: int, decision: str) -> None:
        """Answer a report. Raises OSError."""
        line = msgspec.json.encode(Answer(step, decision)) + b"\n"  # type: ignore[arg-type]
        fd = open_regular(self.answers, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def wait_until_ended(self, limit_s: float) -> bool:
        """Wait until all of its processes on this node have ended; return whether they have."""
        try:
            fd = open_regular(self.lock, os.O_RDWR)
        except OSError:
            return True
        limit = time.monotonic() + limit_s
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() > limit:
                        return False
                except OSError:  # the file system has no such locks
                    return True
                time.sleep(POLL_S)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class TrialFolder:
    """The folder of one trial."""

    path: Path

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def has_checkpoint(self) -> bool:
        """Whether the script has written to the folder of checkpoints."""
        try:
            return any(not path.name.startswith(".") for path in self.checkpoint.iterdir())
        except OSError:
            return False

    def take_checkpoint(self, other: "TrialFolder") -> None:
        """Begin with a copy of another trial's checkpoint: all of it, or none. Raises OSError."""
        left = (COPY_PREFIX, REMOVED_PREFIX + COPY_PREFIX)  # by a process that was killed
        for path in list(self.path.iterdir()):
            if path.name.startswith(left):
                remove_from_marked(path, MARK)
        with TemporaryFolder(COPY_PREFIX, self.path) as new:
            _copy_tree(other.checkpoint, new / CHECKPOINT)
            os.replace(new / CHECKPOINT, self.checkpoint)

    def remove_checkpoint(self) -> bool:
        """Remove the checkpoint if Paceline has created the trial's folder.

        Return whether there is none now.
        """
        if self.checkpoint.exists():
            try:
                remove_from_marked(self.checkpoint, MARK)
            except OSError:
                pass
        return not self.checkpoint.exists()

    def attempts(self) -> list[Attempt]:
        """Return the attempts, the last one at the end."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        numbers = [int(found[1]) for name in names if (found := _ATTEMPT.fullmatch(name))]
        return [Attempt(self.path, number) for number in sorted(numbers)]

    def begin_attempt(self) -> Attempt:
        """Create the files of the next attempt. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            make_marked(self.path, MARK)
        last = self.attempts()
        attempt = Attempt(self.path, last[-1].number + 1 if last else 1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        os.close(open_regular(attempt.lock, flags, follow_links=False, mode=0o666))
        return attempt


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, without hidden files.

    Raises:
        OSError: Something can't be copied. It has the number of the first error: that of
            ``copytree`` has none.
    """
    try:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*"))
    except shutil.Error as error:
        _, name, text = error.args[0][0]
        if number := re.match(r"\[Errno (\d+)\] ", str(text)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(name)) from error
        raise


# How a run of a trial ended: from its exit code, its output and what it has reported.

# Kinds of failures.
OUT_OF_MEMORY, DIVERGED, CRASHED = "out of memory", "diverged", "crashed"
HUNG, LOST_NODE, TIME_LIMIT = "hung", "lost node", "time limit"
NO_METRIC, NO_CHECKPOINT, FULL_DISK = "no metric", "no checkpoint", "full disk"
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
                matched = self._pattern.search(line[:10_000].decode(errors="replace"))
                if matched and (pair := _read_match(matched, before + self._count + 1)):
                    self._count += 1
                    found.append(pair)
        return found


def _read_match(match: re.Match[str], number: int) -> tuple[int, float] | None:
    """Return step and value of a match of this number; None if they are no numbers."""
    groups = match.groupdict()
    text = groups.get("value") or next(
        (group for group in match.groups() if group is not None and group != groups.get("step")),
        "",
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
        line = next((one for one in last if pattern.search(one)), None)
        if line is not None:
            return Failure(kind, f"{line.strip()}\n{text}")
    free = free_space(attempt.folder)
    if free is not None and free < FULL_BYTES:  # it may not even have printed its error
        return Failure(FULL_DISK, f"{attempt.folder} has no space left; {reason}\n{text}")
    return Failure(CRASHED, f"{reason} (exit code {code})\n{text}")


def good_attempts(folder: TrialFolder) -> list[Attempt]:
    """Return the attempts that went to the end of the script."""
    return [attempt for attempt in folder.attempts() if (end := attempt.end()) and end.code == 0]


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
        "seconds": sum(attempt[0] for attempt in attempts.values()),
        "node_hours": sum(attempt[1] for attempt in attempts.values()),
        "attempts": attempts,
    }
    if figures != before and attempts:
        trial.set_user_attr(RUN_FIGURES, figures)


def add_old_figures(trial: "Trial", folder: TrialFolder) -> None:
    """Store the figures of attempts that ended while no runner ran."""
    found = {
        str(attempt.number): [end.seconds, end.seconds / 3600 * end.nodes]
        for attempt in folder.attempts()
        if (end := attempt.end())
    }
    add_figures(trial, found)
