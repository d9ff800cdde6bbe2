"""Predicted and measured gains of this user, to know and show the prediction error.

They are stored as lines of JSON in ``$XDG_STATE_HOME/paceline/predictions.jsonl`` (default:
``~/.local/state``).
"""

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..analyze.diagnosis.diagnosis import PredictionError
from ..record.ring.header_schema import FiniteFloat
from ..security.files import InvalidFileError, error_reason, open_regular, read_regular
from ..security.schema import parse_json

MAX_BYTES = 16 << 20  # about 50,000 lines
MIN_PAIRS = 3  # minimum number of pairs for an error estimate of one kind


@dataclass(frozen=True)
class Pair:
    """Predicted and measured gain of one trial.

    Attributes:
        date: Date of the trial.
        script: Training script.
        knob: Name of the knob.
        source: Kind of the prediction.
        predicted: Predicted gain, as a share of the throughput.
        low: Lower end of the predicted interval.
        high: Upper end of the predicted interval.
        measured: Measured gain, as a share of the throughput.
    """

    date: str
    script: str
    knob: str
    source: str
    predicted: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    measured: FiniteFloat


def path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paceline" / "predictions.jsonl"


def append(pairs: Iterable[Pair]) -> str:
    """Append pairs to the file; return the reason if that failed, else ""."""
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(fd, "a") as stream:
            stream.writelines(json.dumps(asdict(pair)) + "\n" for pair in pairs)
    except OSError as error:
        return f"{file}: {error_reason(error)}: these predictions are not remembered"
    return ""


def prediction_errors() -> dict[str, PredictionError]:
    """Return the prediction error by kind (source), for kinds with at least MIN_PAIRS pairs."""
    each: dict[str, list[float]] = {}
    for pair in _all():
        each.setdefault(pair.source, []).append(100 * abs(pair.measured - pair.predicted))
    return {
        source: PredictionError(statistics.median(points), len(points))
        for source, points in each.items()
        if len(points) >= MIN_PAIRS
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
        except InvalidFileError:  # a truncated line, or one of another version
            continue
    return found
