"""Read and write references: JSON files, and the values of a run in its record folder."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from ...security.outputs import write_output
from ...security.schema import read_json
from .metric import Metric
from .series import Floats, Model, Reference, Series

FORMAT, VERSION = "paceline-reference", 1
RECORD_FILE = "losses.json"  # in a record folder
MAX_BYTES = 256 << 20
MAX_PARSED_BYTES = 1 << 30
MAX_VALUES = 200_000  # of a run; longer ones are stored as means of consecutive values
_Number = float | None


@dataclass
class _StoredRun:
    steps: list[_Number]
    samples: list[_Number]
    values: list[_Number]
    rates: list[_Number] = field(default_factory=list)
    norms: list[_Number] = field(default_factory=list)
    name: str = ""
    peak_rate: _Number = None


@dataclass
class _Stored:
    format: str
    version: Annotated[int, Meta(ge=1)]
    metric: Metric
    runs: list[_StoredRun]
    model: Model = field(default_factory=Model)
    command: list[str] = field(default_factory=list)


def write_reference(path: Path, reference: Reference) -> None:
    """Write a reference. Raises OSError."""
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "metric": asdict(reference.metric),
        "model": asdict(reference.model),
        "command": reference.command,
        "runs": [_stored(run) for run in reference.runs],
    }
    write_output(path, json.dumps(tree) + "\n")


def read_reference(path: Path) -> Reference:
    """Read a reference from a file, or from the record folder of a run with ``--metric``.

    Raises:
        ValueError: There is none, or it does not match the format.
    """
    file = path / RECORD_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ValueError(
            f"{path} has no {RECORD_FILE}, so it is no record with losses. HINT: record the run "
            f"with paceline run --record {path} --metric loss, or make a reference with "
            "paceline run --make-reference FILE"
        )
    try:
        stored = read_json(
            file, _Stored, MAX_BYTES, escape=False, max_parsed_bytes=MAX_PARSED_BYTES
        )
    except OSError as error:
        raise ValueError(
            f"{file}: {error.strerror}. HINT: paceline run --make-reference {file} makes it"
        ) from None
    if stored.format != FORMAT or stored.version > VERSION:
        raise ValueError(
            f"{file} is no reference that this version of Paceline reads (format "
            f"{stored.format[:40]!r}, version {stored.version}). HINT: make it again with "
            "paceline run --make-reference"
        )
    runs = [_series(run, f"{file}, run {i + 1}") for i, run in enumerate(stored.runs)]
    if not runs:
        raise ValueError(f"{file} has no run. HINT: make it again with paceline run")
    return Reference(stored.metric, runs, stored.model, stored.command)


def merge_references(references: list[Reference]) -> Reference:
    """Return one reference with the runs of all.

    Raises:
        ValueError: Their metrics or models differ.
    """
    first = references[0]
    for other in references[1:]:
        if other.metric != first.metric:
            raise ValueError(
                f"the references are of different metrics: {first.metric}, and {other.metric}. "
                "HINT: --reference with runs of one metric"
            )
        difference = first.model.difference(other.model)
        if difference:
            raise ValueError(
                f"the references are of different models: {difference}. HINT: --reference with "
                "runs of one model"
            )
    runs = [run for reference in references for run in reference.runs]
    return Reference(first.metric, runs, first.model, first.command)


def _stored(run: Series) -> dict[str, Any]:
    every = -(-len(run) // MAX_VALUES)
    columns = {
        name: _thinned(getattr(run, name), every)
        for name in ("steps", "samples", "values", "rates", "norms")
    }
    return {
        "name": run.name,
        "peak_rate": run.peak_rate if np.isfinite(run.peak_rate) else None,
        **{
            name: [float(f"{v:.9g}") if np.isfinite(v) else None for v in column.tolist()]
            for name, column in columns.items()
        },
    }


def _thinned(values: Floats, every: int) -> Floats:
    """Return the means of each ``every`` values."""
    if every <= 1:
        return values
    count = len(values) // every * every
    return np.asarray(values[:count].reshape(-1, every).mean(axis=1))


def _series(run: _StoredRun, name: str) -> Series:
    count = len(run.values)
    columns = [_column(part, count) for part in (run.steps, run.samples, run.values)]
    if any(len(column) != count for column in columns):
        raise ValueError(f"{name} has columns of different lengths. HINT: make the reference again")
    steps, samples, values = columns
    order = np.argsort(samples if np.all(samples > 0) else steps, kind="stable")
    rates, norms = (_column(part, count) for part in (run.rates, run.norms))
    peak = np.nan if run.peak_rate is None else run.peak_rate
    ordered = steps[order], samples[order], values[order], rates[order], norms[order]
    return Series(*ordered, name, peak)


def _column(values: list[float | None], count: int) -> Floats:
    if not values:
        return np.full(count, np.nan)
    return np.array([np.nan if value is None else value for value in values], np.float64)
