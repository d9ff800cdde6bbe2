"""The guard of a running job: takes the ranks' messages and output, and judges the loss."""

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...analyze.reference.changes import (
    Change,
    JobStep,
    RateRise,
    RateWatch,
    ReplicaWatch,
    find_changes,
)
from ...analyze.reference.metric import BACKWARD, LOGGED, PATTERN, Metric
from ...analyze.reference.reference_file import merge_references, read_reference, write_reference
from ...analyze.reference.run_guard import Divergence, RunGuard, Standard, make_standard
from ...analyze.reference.series import SAMPLES, STEPS, Model, Reference, Series
from ...plurals import counted
from ...report import guard_messages as text
from ...security.files import read_regular
from ...security.text import printable
from .request import GuardRequest, Row, parse_metric

SILENT_LINES, SILENT_STEPS, SILENT_S = 200, 100, 60.0  # without a value: the user is warned
MAX_BATCH_RATIO = 1.02  # of samples per step, compared with the reference
SHOWN_CHARS = 100  # of a line of output
Value = tuple[float, float, float]  # step, samples (0: not known), value
MAX_OUTPUT_BYTES = 256 << 20


# Find the value of a metric in lines of a job's output.

MAX_LINE_CHARS = 10_000
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class MetricLine:
    """A line with a value; ``step`` and ``samples`` where the pattern names them."""

    value: float
    step: float | None = None
    samples: float | None = None


class MetricPattern:
    """The pattern of ``--metric``. ``text``: checked by ``request.parse_metric``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = re.compile(text)
        names = self._pattern.groupindex
        self.has_steps = "step" in names
        others = set(range(1, self._pattern.groups + 1)) - set(names.values())
        self._value = names.get("value") or min(others)

    def find(self, line: str) -> MetricLine | None:
        """Return the values in a line, or None. Thousands separators are removed."""
        match = self._pattern.search(_COLOURS.sub("", line[:MAX_LINE_CHARS]))
        if match is None:
            return None
        value = _number(match[self._value])
        if value is None:
            return None
        groups = match.groupdict()
        return MetricLine(value, _number(groups.get("step")), _number(groups.get("samples")))


def _number(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.replace(",", "").rstrip(".;:)]%"))
    except ValueError:
        return None


# Read what ``--reference`` names: reference files, record folders, and outputs of runs.


def load_reference(paths: list[str], metric: str | None) -> Reference:
    """Read and join references.

    Args:
        paths: Files of ``--make-reference``, record folders, or files with the output of a run.
        metric: ``--metric``; needed for outputs, otherwise it must be that of the references.

    Raises:
        ValueError: A reference can't be read, or is of another metric or model than the others.
    """
    wanted = parse_metric(metric)
    found = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise ValueError(
                f"--reference {name} does not exist. HINT: paceline run --make-reference {name} "
                "SCRIPT makes it"
            )
        if path.is_dir() or _is_json(path):
            reference = read_reference(path)
            if metric is not None and reference.metric != wanted:
                raise ValueError(
                    f"--reference {name} is of another metric: it has {reference.metric}, and "
                    f"--metric is {metric!r}. HINT: leave out --metric, or make a reference of "
                    "this metric"
                )
            found.append(reference)
        elif wanted.source == PATTERN:
            found.append(read_output(path, wanted))
        else:
            raise ValueError(
                f"--reference {name} is neither a reference nor a record folder. HINT: for the "
                r"output of a run add its pattern: --metric 'loss[ =:]+(\S+)'"
            )
    return merge_references(found)


def read_output(path: Path, metric: Metric) -> Reference:
    """Return the values that a pattern finds in the output of a run.

    Raises:
        ValueError: It finds none, or the file can't be read.
    """
    try:
        text = read_regular(path, MAX_OUTPUT_BYTES).decode(errors="replace")
    except OSError as error:
        raise ValueError(f"--reference {path}: {error.strerror}") from None
    pattern, lines = MetricPattern(metric.name), text.replace("\r", "\n").split("\n")
    found = [value for line in lines if (value := pattern.find(line)) is not None]
    if not found:
        raise ValueError(
            f"--metric {metric.name!r} matches none of the {len(lines):,} lines of {path}. HINT: "
            "look at a line of the output, and write a pattern for it"
        )
    count = len(found)
    steps = [
        number if line.step is None else line.step for number, line in enumerate(found, start=1)
    ]
    samples = [0.0 if line.samples is None else line.samples for line in found]
    unknown = np.full(count, np.nan)
    values = np.array([line.value for line in found], np.float64)
    run = Series(np.array(steps), np.array(samples), values, unknown, unknown, str(path))
    return Reference(metric, [run])


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise ValueError(f"--reference {path}: {error.strerror}") from None


# The optimizer steps of a job, joined from the messages of its ranks.

MAX_BEHIND = 256  # steps that a rank may be behind before the others' values are used without it
MAX_KEPT = 4096  # last steps that are kept to explain a divergence


@dataclass
class JobSteps:
    """Joins the rows of ``ranks`` ranks to steps.

    Attributes:
        kept: The last steps.
    """

    ranks: int
    kept: deque[JobStep] = field(default_factory=lambda: deque(maxlen=MAX_KEPT))
    _rows: dict[int, dict[int, Row]] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # samples of each rank
    _last: int = -1

    def add(self, rank: int, rows: list[Row]) -> list[JobStep]:
        """Add rows of a rank; return the steps that are complete now, in their order."""
        for row in rows:
            if row[0] > self._last:
                self._rows.setdefault(row[0], {})[rank] = row
        newest = max(self._rows, default=0)
        complete = []
        for step in sorted(self._rows):
            of_step = self._rows[step]
            if len(of_step) < self.ranks and step > newest - MAX_BEHIND:
                break
            del self._rows[step]
            self._last = step
            complete.append(self._join(step, of_step))
        self.kept.extend(complete)
        return complete

    def finish(self) -> list[JobStep]:
        """Return the steps that some ranks have not sent, at the end of the job."""
        rest = [self._join(step, rows) for step, rows in sorted(self._rows.items())]
        self._rows = {}
        self.kept.extend(rest)
        return rest

    def _join(self, step: int, rows: dict[int, Row]) -> JobStep:
        for rank, row in rows.items():
            self._seen[rank] = row[1]
        is_counted = all(row[2] > 0 for row in rows.values())
        losses = {rank: row[3] for rank, row in rows.items() if row[3] is not None}
        weights = {rank: rows[rank][2] if is_counted else 1 for rank in losses}
        total = sum(weights.values())
        mean = sum(weights[rank] * loss for rank, loss in losses.items()) / total if total else None
        norms = [row[5] for row in rows.values() if row[5] is not None]
        rates = [row[4] for row in rows.values() if row[4] is not None]
        return JobStep(
            step,
            sum(self._seen.values()),
            mean if mean is not None else math.nan,
            losses,
            rates[0] if rates else math.nan,
            max(norms, key=lambda norm: (math.isnan(norm), norm)) if norms else math.nan,
            {rank: row[6] for rank, row in rows.items() if row[6] is not None},
        )


@dataclass(frozen=True)
class Departure:
    """Where the job left the band, or its ranks no longer held the same parameters.

    Attributes:
        kind: "high", "low", "nonfinite" or "replicas".
        step: First step of it.
        samples: Samples of all ranks until then; None if they are not known.
        found_step: Step at which it was certain.
        value, expected: Mean of the metric since then, of the job and of the reference; None if
            only the parameters differ.
        changes: What changed there.
    """

    kind: str
    step: int
    samples: float | None = None
    found_step: int | None = None
    value: float | None = None
    expected: float | None = None
    changes: list[Change] = field(default_factory=list)


class LossGuard:
    """The guard of one job, over all of its attempts.

    Messages arrive in the output's thread, ``check`` is called by the launcher's.

    Attributes:
        mistake: Why the reference does not fit the job, or "".
        departure: Where the job left the band, or None.
        rises: Rises of the learning rate that the reference does not have.
        tested: Values of the last attempt that were held against the reference.
        reached: The first value that met the goal, or None.
    """

    def __init__(self, request: GuardRequest, ranks: int, command: list[str]) -> None:
        """Read and measure the reference. Raises ValueError if that is not possible."""
        self.request, self.ranks, self._command = request, ranks, command
        self.reference: Reference | None = None
        self.standard: Standard | None = None
        self.metric = parse_metric(request.metric)
        if request.references:
            self.reference = load_reference(request.references, request.metric)
            self.metric = self.reference.metric
            self.standard = make_standard(self.reference)
        self._pattern = MetricPattern(self.metric.name) if self.metric.source == PATTERN else None
        # lines without step and samples are compared by their number
        self._counts_lines = self._pattern is not None and not self._pattern.has_steps
        self._lock = threading.RLock()
        self.mistake = ""
        self.departure: Departure | None = None
        self.rises: list[RateRise] = []
        self.reached: Value | None = None
        self._peak_rate = np.nan
        self._messages: list[str] = []
        # of all attempts, for ``save``; each step once, as the last attempt trained it
        self._values: list[Value] = []
        self._rows: list[JobStep] = []  # steps of ``_values`` where they are the steps' losses
        self._model = Model()
        self._lines = self._matches = 0
        self._last_line = ""
        self._first_step_at = 0.0
        self._is_warned = self._is_over = False
        self.begin_attempt(ranks)

    def begin_attempt(self, ranks: int) -> None:
        """Forget the position of an attempt that has ended."""
        with self._lock:
            self.ranks = ranks
            self._steps = JobSteps(ranks)
            self._replicas = ReplicaWatch(ranks)
            self._guard = RunGuard(self.standard) if self.standard is not None else None
            self._rates = RateWatch(self.reference) if self.reference is not None else None
            self.tested: list[Value] = []
            self._has_values = False  # of this attempt
            self._pending_changes: tuple[int, Divergence | None] | None = None
            self._batch_compared = False

    @property
    def start_text(self) -> str:
        """What is printed before the ranks start."""
        if self.reference is None or self.standard is None:
            return ""
        return text.describe_start(self.reference, self.standard)

    @property
    def watch_variable(self) -> str:
        """Value of the environment variable PACELINE_GUARD of the ranks."""
        return "each" if self._pattern is not None else "1"

    # Messages and output of the ranks

    def take_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message of a rank, if it is for the guard."""
        with self._lock:
            if "steps" in message:
                for step in self._steps.add(rank, message["steps"]):
                    self._take_step(step)
            elif "model" in message and rank == 0:
                self._take_model(Model(**message["model"]))
            elif "logged" in message and self.metric.source == LOGGED:
                value = message["logged"].get(self.metric.name)
                self._lines += 1
                self._last_line = ", ".join(message["logged"])
                if value is not None:
                    samples = self.ranks * message["seen"]  # by rank 0
                    self._take_value(float(message["step"]), float(samples), value)

    def take_line(self, rank: int, line: str) -> None:
        """Take a line of output. Rank 0's count; those of others only if it prints none."""
        if self._pattern is None:
            return
        with self._lock:
            self._lines += 1
            found = self._pattern.find(line)
            if found is None:
                self._last_line = line
                return
            if rank and self._matches:
                return
            self._matches += rank == 0
            last = self._steps.kept[-1] if self._steps.kept else None
            samples = float(last.samples) if last is not None else 0.0
            step = float(last.step) if last is not None else float(len(self.tested) + 1)
            if found.step is not None:
                known = self._samples_at(found.step)
                step, samples = found.step, known if known else samples
            if found.samples is not None:
                samples = found.samples
            self._take_value(step, samples, found.value)

    def _samples_at(self, step: float) -> float:
        """Return the samples of all ranks at a step that the script counts from 0 or 1."""
        kept = self._steps.kept
        if len(kept) < 2 or kept[-1].samples <= 0:
            return 0.0
        per_step = kept[-1].samples / max(kept[-1].step, 1)
        return step * per_step if step > 0 else 0.0

    def _take_step(self, step: JobStep) -> None:
        self._first_step_at = self._first_step_at or time.monotonic()
        self._peak_rate = float(np.fmax(self._peak_rate, step.rate))
        self._compare_batch()
        if self._rates is not None:
            rise = self._rates.add(step.step, step.samples, step.rate)
            if rise is not None and self.departure is None:
                self.rises.append(rise)
                self._messages.append(text.describe_rise(rise))
        found = self._replicas.add(step.step, step.bits)
        if found is not None and self.reference is not None and self.departure is None:
            self._pending_changes = (found.step, None)
        if self.metric.source == BACKWARD and step.losses:
            self._take_value(float(step.step), float(step.samples), step.loss)
            self._rows.append(step)

    def _take_value(self, step: float, samples: float, value: float) -> None:
        if not self._has_values:
            self._has_values = True
            self._forget_repeated_steps(step, samples)
        self._values.append((step, samples, value))
        goal = self.request.goal
        if goal is not None and self.reached is None and goal.is_reached(value):
            self.reached = (step, samples, value)
        if self._guard is None or self.standard is None or self.departure is not None:
            return
        if self.standard.axis == SAMPLES and samples <= 0:
            self._compare_by_steps()
        place = samples if self.standard.axis == SAMPLES else step
        if self.standard.axis == STEPS and self._counts_lines:
            place = len(self.tested) + 1
        self.tested.append((step, samples, value))
        divergence = self._guard.add(place, value)
        if divergence is not None:
            first = int(self.tested[divergence.start][0])
            self._pending_changes = (first, divergence)
        elif self._guard.is_over and not self._is_over:
            self._is_over = True
            self._messages.append(
                f"paceline: guard: the reference ends at {self.standard.band.end:,.0f} "
                f"{self.standard.axis}; later values are not held against it. HINT: make the "
                "reference as long as the job\n"
            )

    def _forget_repeated_steps(self, step: float, samples: float) -> None:
        """Forget the values of earlier attempts from the first one of this attempt on."""
        while self._values:
            last_step, last_samples, _ = self._values[-1]
            if last_step < step and not 0 < samples <= last_samples:
                break
            del self._values[-1]
            del self._rows[len(self._values) :]

    def _compare_by_steps(self) -> None:
        """Compare at equal steps from now on: the samples of this job are not known."""
        assert self.reference is not None
        self.reference = replace(self.reference, by_steps=True)
        self.standard = make_standard(self.reference)
        self._guard, self.tested = RunGuard(self.standard), []
        self._messages.append(
            "paceline: guard: the samples of this job are not known, so it is compared with the "
            "reference at equal steps. HINT: a DataLoader that Paceline sees, or a group "
            "(?P<samples>...) in --metric\n"
        )

    def _take_model(self, model: Model) -> None:
        self._model = model
        if self.reference is not None:
            difference = self.reference.model.difference(model)
            if difference:
                self.mistake = (
                    f"the reference is of another model: {difference}. HINT: make a reference of "
                    "this model with paceline run --make-reference"
                )

    def _compare_batch(self) -> None:
        """Say it if a step of the job has another number of samples than one of the reference."""
        kept = self._steps.kept
        if self._batch_compared or self.reference is None or len(kept) < 10:
            return
        self._batch_compared = True
        ours = kept[-1].samples / max(kept[-1].step, 1)
        theirs = self.reference.runs[0].samples_per_step
        if not ours or not theirs or max(ours / theirs, theirs / ours) < MAX_BATCH_RATIO:
            return
        self._messages.append(
            f"paceline: guard: a step has {ours:.0f} samples, in the reference {theirs:.0f}. Runs "
            "are compared at equal samples; with another global batch a right training may differ "
            "too. HINT: make the reference with the same global batch\n"
        )

    # The launcher

    def check(self, say: Callable[[str], None]) -> str:
        """Print what is new. Return "diverged" when the job has left the band, "mistake" when the
        reference does not fit it, "reached" once the goal is met, and otherwise "".
        """
        with self._lock:
            result = self._check()
        self._print(say)
        return result

    def _check(self) -> str:
        if self.mistake and self.departure is None:
            return "mistake"
        self._warn_if_silent()
        result = "reached" if self.reached is not None else ""
        if self._pending_changes is None or self.reference is None:
            return result
        first, divergence = self._pending_changes
        self._pending_changes = None
        if self.departure is not None:
            return result
        self._messages.append(self._leave(first, divergence, self.reference))
        return "diverged"

    def _print(self, say: Callable[[str], None]) -> None:
        """Print the messages. Without the lock: the output's thread holds that of the output when
        it calls ``take_message``.
        """
        with self._lock:
            messages, self._messages = self._messages, []
        for message in messages:
            say(message)

    def describe_reached(self) -> str:
        """Return the message for a job that has reached its goal, without its end."""
        assert self.reached is not None
        assert self.request.goal is not None
        return text.describe_reached(self.request.goal, *self.reached)

    def _leave(self, first: int, divergence: Divergence | None, reference: Reference) -> str:
        """Set ``departure``, and return the message."""
        changes: list[Change] = find_changes(
            list(self._steps.kept), first, reference, self._replicas.difference, divergence
        )
        if divergence is None:
            self.departure = Departure("replicas", first, changes=changes)
            return text.describe_replicas(changes)
        assert self.standard is not None
        _, samples, _ = self.tested[divergence.start]
        found_step = int(self.tested[divergence.found][0])
        means = divergence.value, divergence.expected
        self.departure = Departure(
            divergence.kind, first, samples or None, found_step, *means, changes
        )
        return text.describe_divergence(
            divergence, first, samples, found_step, self.standard, changes
        )

    def _warn_if_silent(self) -> None:
        """Warn once if the job trains and no value was found."""
        if self._values or self._is_warned:
            return
        steps = len(self._steps.kept)
        waited = time.monotonic() - self._first_step_at if self._first_step_at else 0.0
        if self._lines >= SILENT_LINES or steps >= SILENT_STEPS or waited >= SILENT_S:
            self._is_warned = True
            self._messages.append(self._silence(steps))

    def _silence(self, steps: int) -> str:
        after = f"after {counted(steps, 'step')}"
        if self.metric.source == PATTERN:
            shown = printable(self._last_line[:SHOWN_CHARS])
            last = f" The last one is: {shown!r}." if self._lines else ""
            return (
                f"paceline: guard: --metric {self.metric.name!r} matches none of "
                f"{counted(self._lines, 'line')} of output {after}.{last} HINT: try it with "
                "python -c 'import re; ...', or leave out --metric for the loss of each backward\n"
            )
        if self.metric.source == LOGGED:
            known = f"; it has {printable(self._last_line)}" if self._last_line else ""
            return (
                f"paceline: guard: world.log has no value {self.metric.name!r} {after}{known}. "
                "HINT: --metric with the name of a value of world.log, or a regular expression\n"
            )
        return (
            f"paceline: guard: no loss was seen {after}: no backward of a single number. HINT: "
            r"--metric 'loss[ =:]+(\S+)' for a loss that the script prints" + "\n"
        )

    def finish(self, say: Callable[[str], None]) -> str:
        """Take what is left at the end of the job, print the result, and save the values. Return
        the last answer of ``check``.
        """
        with self._lock:
            for step in self._steps.finish():
                self._take_step(step)
            result = self._check()
            goal = self.request.goal
            wanted = self.reference or self.request.save or goal
            if not self._values and not self._is_warned and wanted:
                self._messages.append(self._silence(len(self._steps.kept)))
            elif goal is not None and self.reached is None and self._values:
                best = goal.best(value for _, _, value in self._values)
                self._messages.append(text.describe_unreached(goal, best))
            elif self.standard is not None and self.departure is None and self._guard is not None:
                axis = self.standard.axis
                end = self.tested[-1][1 if axis == SAMPLES else 0] if self.tested else 0.0
                self._messages.append(text.describe_end(len(self.tested), self.metric, end, axis))
            if self.request.save is not None and self._values:
                self._save(Path(self.request.save))
        self._print(say)
        return result

    def _save(self, path: Path) -> None:
        try:
            write_reference(path, self.result())
        except OSError as error:
            self._messages.append(f"paceline: guard: {path}: {error.strerror}\n")

    def result(self) -> Reference:
        """Return the values of this job as a reference of one run."""
        columns = np.array(self._values, np.float64).reshape(-1, 3)
        unknown = np.full(len(columns), np.nan)
        rates, norms = unknown, unknown
        if self.metric.source == BACKWARD:
            rates = np.array([step.rate for step in self._rows])
            norms = np.array([step.norm for step in self._rows])
        steps = columns[:, 0]
        if self._counts_lines and not np.all(columns[:, 1] > 0):
            steps = np.arange(1.0, len(columns) + 1)
        series = Series(
            steps, columns[:, 1], columns[:, 2], rates, norms, peak_rate=self._peak_rate
        )
        return Reference(self.metric, [series], self._model, self._command)
