"""Predicted and measured gains of this user, so that the tool's own error is known and shown: a
line of JSON each in ``$XDG_STATE_HOME/paceline/predictions.jsonl`` (``~/.local/state``)."""

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..record.ring.header_schema import FiniteFloat
from ..security.error_reason import reason_of
from ..security.files import InvalidFileError, open_regular, read_regular
from ..security.schema import parse_json

MAX_BYTES = 16 << 20  # some 50,000 lines
ENOUGH = 3  # pairs that say something of a kind


@dataclass(frozen=True)
class Pair:
    """Gains of the throughput, as shares of it. source: what kind of prediction it was."""

    date: str
    script: str
    knob: str
    source: str
    predicted: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    measured: FiniteFloat


@dataclass(frozen=True)
class Off:
    """By how many percentage points predictions of a kind were off: the median of ``count``."""

    points: float
    count: int


def path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paceline" / "predictions.jsonl"


def remember(pairs: Iterable[Pair]) -> str:
    """Append them; why that could not be, or ""."""
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(fd, "a") as stream:
            stream.writelines(json.dumps(asdict(pair)) + "\n" for pair in pairs)
    except OSError as error:
        return f"{file}: {reason_of(error)}: these predictions are not remembered"
    return ""


def off() -> dict[str, Off]:
    """By kind (source), of all that were remembered; kinds with few of them are left out."""
    each: dict[str, list[float]] = {}
    for pair in _all():
        each.setdefault(pair.source, []).append(100 * abs(pair.measured - pair.predicted))
    return {
        source: Off(statistics.median(points), len(points))
        for source, points in each.items()
        if len(points) >= ENOUGH
    }


def _all() -> list[Pair]:
    try:
        lines = read_regular(path(), MAX_BYTES).splitlines()
    except (OSError, InvalidFileError):
        return []
    found = []
    for line in lines:
        try:
            found.append(parse_json(line, Pair, path()))
        except InvalidFileError:  # a line that was cut short, or of another version
            continue
    return found
