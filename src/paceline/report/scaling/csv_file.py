"""Sizes of a study as CSV: one line for each size of each kind. Columns: formats/scaling.md."""

import csv
import io
import math

from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.study_model import ScalingStudy
from .size_rows import FACTORS, SizeRow, size_rows

ESTIMATES = ("step", "throughput", "speedup", "efficiency")
_COLUMN = {"step": "step_s", "throughput": "samples_per_s"}
STATE_NAMES = ("useful", "input", "checkpoint", "validation", "starved", "other")
STATE_COLUMNS = (*STATE_NAMES, "bubble", "wait", "transfer")


def csv_text(study: ScalingStudy) -> str:
    """Return the study as CSV with a header; unknown figures are empty cells."""
    rows = [_cells(row) for kind in study.request.kinds for row in size_rows(study, kind)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns())
    writer.writerows([row.get(name, "") for name in columns()] for row in rows)
    return text.getvalue()


def columns() -> list[str]:
    """Return the names of the columns, in their order."""
    estimates = [
        name
        for figure in ESTIMATES
        for name in (
            _COLUMN.get(figure, figure),
            f"{_COLUMN.get(figure, figure)}_low",
            f"{_COLUMN.get(figure, figure)}_high",
        )
    ]
    return [
        *("scaling", "ranks", "nodes", "global_batch", "rank_batch", "runs", "failed_runs"),
        *estimates,
        *("computation_scalability", "global_efficiency"),
        *FACTORS,
        *(f"{state}_s" for state in STATE_COLUMNS),
        *("memory_bytes", "device_bytes", "joules_per_sample", "energy_is_estimate"),
        *("node_hours_per_million_samples", "failure", "layout"),
    ]


def _cells(row: SizeRow) -> dict[str, object]:
    point = row.point
    cells: dict[str, object] = {
        "scaling": point.kind,
        "ranks": point.ranks,
        "nodes": point.hosts,
        "global_batch": point.setup.global_batch,
        "rank_batch": point.setup.rank_batch,
        "runs": len(point.runs),
        "failed_runs": point.failed_runs,
        "computation_scalability": row.computation,
        "global_efficiency": row.global_efficiency,
        "memory_bytes": row.memory_bytes,
        "device_bytes": row.device_bytes,
        "node_hours_per_million_samples": row.node_hours_per_million,
        "failure": _first_line(point.failure),
        "layout": point.layout,
    }
    for figure in ESTIMATES:
        found: Estimate | None = getattr(row, figure)
        name = _COLUMN.get(figure, figure)
        if found is not None:
            cells |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    cells |= row.pop
    cells |= {f"{state}_s": seconds for state, seconds in row.states.items()}
    if row.energy is not None:
        cells |= {"joules_per_sample": row.energy.joules}
        cells |= {"energy_is_estimate": int(row.energy.is_estimate)}
    return {name: _cell(value) for name, value in cells.items()}


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t")):
        return "'" + value  # a spreadsheet would take it as a formula
    return value


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
