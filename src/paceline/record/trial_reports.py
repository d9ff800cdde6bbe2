"""What a rank reports to ``paceline tune``, and what the runner of the study answers.

The runner starts a trial with ``PACELINE_SEARCH``, which names a file. Rank 0 appends one line of
JSON to it for each report. At steps at which the search decides, rank 0 waits for the runner's
answer in a second file before the script continues, so that all ranks of a trial stop after the
same step. Files also reach ranks on other nodes, and survive a runner that was killed. Without the
environment variable, and on other ranks, nothing is reported.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..security.files import InvalidFileError, open_regular, read_regular, write_all
from ..security.schema import parse_json

VARIABLE = "PACELINE_SEARCH"
MAX_READ_BYTES = 1 << 22  # of a file at a time
MAX_LINE_BYTES = 1 << 16
MAX_VALUES = 200
# A runner answers within milliseconds. A trial whose runner was killed is ended by then.
ANSWER_TIMEOUT_S = 60.0
FIRST_POLL_S, MAX_POLL_S = 0.002, 0.05
CONTINUE, PAUSE, STOP = "continue", "pause", "stop"

Step = Annotated[int, Meta(ge=0, le=(1 << 62))]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class TrialRequest(msgspec.Struct, frozen=True):
    """Value of ``PACELINE_SEARCH``.

    Attributes:
        reports: File for the reports.
        answers: File with the runner's answers.
        metric: Name of a value that is reported without one.
        every_step: Whether the search decides at every step.
        steps: Otherwise: steps at which it decides.
        keeps_options: Whether restored optimizers keep the options that the script has given them.
    """

    reports: str
    answers: str
    metric: Name
    every_step: bool = False
    steps: Annotated[list[Step], Meta(max_length=1000)] = []
    keeps_options: bool = False


class Report(msgspec.Struct, frozen=True):
    """One line of the file of reports.

    Attributes:
        step: Number of the step or epoch.
        values: Values by name.
        waits: Whether rank 0 waits until the runner ends the trial.
    """

    step: Step
    values: Annotated[
        dict[Name, float | Literal["nan", "inf", "-inf"]], Meta(max_length=MAX_VALUES)
    ]
    waits: bool = False


class Answer(msgspec.Struct, frozen=True):
    """One line of the file of answers."""

    step: Step
    decision: Literal["continue", "pause", "stop"]


class TrialReporter:
    """Reports of rank 0 of one trial."""

    def __init__(self, request: TrialRequest) -> None:
        self.request = request
        self._steps, self._count = set(request.steps), 0
        self._answered: set[int] = set()
        self._answers = LineReader(request.answers, Answer)
        self._stoppers: list[Callable[[str], None]] = []

    def add_stopper(self, stop: Callable[[str], None]) -> None:
        """Have ``stop`` called when the search pauses the trial. It receives the reason, and makes
        all ranks save a checkpoint and end.
        """
        self._stoppers.append(stop)

    def remove_stopper(self, stop: Callable[[str], None]) -> None:
        if stop in self._stoppers:
            self._stoppers.remove(stop)

    def report(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Report the numbers among ``values``. Returns when the script may continue.

        Args:
            values: Numbers or tensors of one element; anything else is left out.
            step: Number of the step or epoch; None: the number of reports, from 1.

        Raises:
            OSError: The report can't be written.
        """
        self._count += 1
        step = self._count if step is None else int(step)
        numbers = {
            str(name)[:200]: number
            for name, value in values.items()
            if (number := _number(value)) is not None
        }
        if not numbers:
            return
        self._write(step, numbers)
        decides = self.request.every_step or step in self._steps
        if not decides or self.request.metric not in numbers or step in self._answered:
            return
        self._answered.add(step)
        decision = self._wait_for_answer(step)
        if decision == CONTINUE:
            return
        if decision == PAUSE and self._stoppers:
            self._stoppers[-1](f"the search pauses this trial after step {step}")
            return
        self._write(step, {}, waits=True)  # the runner ends the job
        time.sleep(ANSWER_TIMEOUT_S)

    def _write(self, step: int, numbers: dict[str, float | str], waits: bool = False) -> None:
        line = {"step": step, "values": numbers, **({"waits": True} if waits else {})}
        data = json.dumps(line).encode() + b"\n"
        fd = open_regular(self.request.reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o666)
        try:
            write_all(fd, data)
        finally:
            os.close(fd)

    def _wait_for_answer(self, step: int) -> str:
        """Return the runner's decision; CONTINUE if there is none in time."""
        limit, poll_s = time.monotonic() + ANSWER_TIMEOUT_S, FIRST_POLL_S
        while time.monotonic() < limit:
            while answers := self._answers.read():
                for answer in answers:
                    if answer.step == step:
                        return str(answer.decision)
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_POLL_S)
        return CONTINUE


class LineReader:
    """Reads what was added to a file of reports or answers since the last call.

    Args:
        path: The file; it may not exist yet.
        schema: Of a line.
    """

    def __init__(self, path: str | Path, schema: type[Any]) -> None:
        self._path, self._schema, self._offset = Path(path), schema, 0

    def read(self) -> list[Any]:
        """Return the new complete lines."""
        data = read_from(self._path, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == MAX_READ_BYTES:  # no line is so long
            end = len(data)
        self._offset += end
        return parse_lines(data[:end], self._schema, self._path)


def read_from(path: Path, offset: int) -> bytes:
    """Return what a file holds from an offset, at most MAX_READ_BYTES; b"" if there is none."""
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(offset)
            return file.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return b""


def read_lines(path: str | Path, schema: type[Any], max_bytes: int) -> list[Any]:
    """Return the complete lines of a file of reports or answers; [] if there is no file."""
    try:
        data = read_regular(path, max_bytes)
    except FileNotFoundError:
        return []
    return parse_lines(data, schema, path)


def parse_lines(data: bytes, schema: type[Any], file: str | Path) -> list[Any]:
    """Return what the complete lines of ``data`` hold, without lines that are not valid."""
    found = []
    for line in data.split(b"\n")[:-1]:
        if len(line) > MAX_LINE_BYTES:
            continue
        try:
            found.append(parse_json(line, schema, file))
        except InvalidFileError:
            continue
    return found


def _number(value: Any) -> float | str | None:
    """Return a number as JSON can hold it, or None if it is none."""
    if getattr(value, "numel", None) is not None and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number - number == 0 else str(number)


def trial_request() -> TrialRequest | None:
    """Return the request of the trial that this process belongs to, on any rank; None outside."""
    text = os.environ.get(VARIABLE, "")
    return _parsed(text) if text else None


def _parsed(text: str) -> TrialRequest:
    return parse_json(text.encode(), TrialRequest, VARIABLE, escape=False)


_reporter: tuple[int, TrialReporter | None] | None = None  # by process: a fork is no rank


def trial_reporter() -> TrialReporter | None:
    """Return the reporter of this process; None outside of a trial, and on ranks above 0."""
    global _reporter
    if _reporter is None or _reporter[0] != os.getpid():
        text = os.environ.get(VARIABLE, "")
        found = None
        if text and os.environ.get("RANK", "0") == "0" and _reporter is None:
            found = TrialReporter(_parsed(text))
        _reporter = os.getpid(), found
    return _reporter[1]
