"""Files of a scaling study for other programs: CSV, Extra-P, TALP-Pages, LaTeX."""

import csv
import io
import json
import math
import statistics
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.batch_advice import batch_advice
from ...analyze.scaling.outcomes.targets import (
    SizeTarget,
    cheapest,
    goal_of,
    learning_rate_rule,
    soonest,
    targets,
)
from ...analyze.scaling.study_model import STRONG, RunFigures, ScalingStudy, StudyRun
from ...plurals import counted
from ...security.text import printable
from ...version import __version__
from ..figure_names import EFFICIENCIES
from ..numbers import finite
from .findings import Findings
from .size_rows import SizeRow, size_rows, unmeasured

ESTIMATES = ("step", "throughput", "speedup", "efficiency")
_COLUMN = {"step": "step_s", "throughput": "samples_per_s"}


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
    names = [_COLUMN.get(figure, figure) for figure in ESTIMATES]
    estimates = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    return [
        *("scaling", "ranks", "nodes", "global_batch", "rank_batch", "runs", "failed_runs"),
        *estimates,
        *("computation_scalability", "global_efficiency"),
        *EFFICIENCIES,
        *(f"{state}_s" for state in STATES),
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
        "failure": point.failure.strip().partition("\n")[0],
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


PARAMETER, TIME, RATE = "p", "time", "samples_per_s"


def extrap_text(study: ScalingStudy, path: Path) -> str:
    """Return the file's text: JSON Lines if the name ends in .jsonl, otherwise JSON.

    Raises:
        ValueError: No size was measured.
    """
    found = _measurements(study)
    if not found:
        raise unmeasured(study)
    if path.suffix == ".jsonl":
        lines = [
            {"params": {PARAMETER: ranks}, "callpath": callpath, "metric": metric, "value": values}
            for (callpath, metric), points in found.items()
            for ranks, values in points.items()
        ]
        return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    tree: dict[str, Any] = {}
    for (callpath, metric), points in found.items():
        rows = [{"point": [ranks], "values": values} for ranks, values in points.items()]
        tree.setdefault(callpath, {})[metric] = rows
    return json.dumps({"parameters": [PARAMETER], "measurements": tree}, allow_nan=False) + "\n"


def _measurements(study: ScalingStudy) -> dict[tuple[str, str], dict[int, list[float]]]:
    """Return the values of the runs by call path and metric, and by number of ranks.

    States in which no run spends time are left out: a model of zeros says nothing.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for kind in study.request.kinds:
        for point in study.of_kind(kind):
            for figures in point.figures:
                for (path, metric), value in _values(figures).items():
                    points = found.setdefault((f"{kind}->{path}", metric), {})
                    points.setdefault(point.ranks, []).append(value)
    return {key: points for key, points in found.items() if any(map(any, points.values()))}


def _values(figures: RunFigures) -> dict[tuple[str, str], float]:
    values = {("step", TIME): figures.mean_step_s, ("step", RATE): figures.throughput}
    for state in STATES:
        values[f"step->{state}", TIME] = float(getattr(figures.seconds, state))
    return values


DLB_VERSION = "3.5.0"  # the format that the files follow
REGION = "Global"
NS = 1e9


def talp_files(study: ScalingStudy) -> dict[str, str]:
    """Return the texts of the files by their names relative to the folder, as strong/n4-b64-0.json.

    Raises:
        ValueError: No size was measured.
    """
    files = {}
    for kind in study.request.kinds:
        for point in study.of_kind(kind):
            for run in point.runs:
                if run.figures is not None:
                    name = f"{kind}/{run.setup.name}-{run.repeat}.json"
                    tree = _tree(run, run.figures)
                    files[name] = json.dumps(tree, indent=2, allow_nan=False) + "\n"
    if not files:
        raise unmeasured(study)
    return files


def _tree(run: StudyRun, figures: RunFigures) -> dict[str, Any]:
    ranks = run.setup.ranks
    started = datetime.fromtimestamp(run.started, UTC).replace(microsecond=0)
    resources = {"numCpus": ranks, "numNodes": run.hosts, "numMpiRanks": ranks}
    return {
        "producer": f"paceline {__version__}",
        "dlbVersion": DLB_VERSION,
        "timestamp": started.isoformat(),
        "resources": resources,
        "Application": {REGION: _region(ranks, run.hosts, figures)},
    }


def _region(ranks: int, hosts: int, figures: RunFigures) -> dict[str, Any]:
    steps, states = len(figures.step_s), figures.seconds
    blocked_s = states.wait + states.transfer
    busy_s = max(figures.mean_step_s - blocked_s, 0.0)
    inside, outside = _balance(ranks, figures)
    pop = {name: value for name, value in figures.pop.items() if value is not None}
    return {
        "numCpus": ranks,
        "numMpiRanks": ranks,
        "numNodes": hosts,
        "avgCpus": float(ranks),
        "cycles": 0.0,
        "instructions": 0.0,
        "numMeasurements": 1,
        "numMpiCalls": round(steps * sum(call.calls * call.size for call in figures.collectives)),
        "numOmpParallels": 0,
        "numOmpTasks": 0,
        "elapsedTime": round(NS * steps * figures.mean_step_s),
        "usefulTime": round(NS * steps * ranks * busy_s),
        "mpiTime": round(NS * steps * ranks * blocked_s),
        "ompLoadImbalanceTime": 0,
        "ompSchedulingTime": 0,
        "ompSerializationTime": 0,
        "parallelEfficiency": pop.get("parallel", 0.0),
        "mpiParallelEfficiency": pop.get("parallel", 0.0),
        "mpiCommunicationEfficiency": pop.get("communication", 0.0),
        "mpiLoadBalance": pop.get("load_balance", 0.0),
        "mpiLoadBalanceIn": inside,
        "mpiLoadBalanceOut": outside,
        "ompParallelEfficiency": 1.0,
        "ompLoadBalance": 1.0,
        "ompSchedulingEfficiency": 1.0,
        "ompSerializationEfficiency": 1.0,
    }


def _balance(ranks: int, figures: RunFigures) -> tuple[float, float]:
    """Return the load balance within nodes and between nodes; their product is the whole.

    Between: mean of all ranks over that of the node with the most. Within: that over the largest of
    a rank.
    """
    busy = figures.spread.busy_mean_s
    whole = figures.pop.get("load_balance") or 0.0
    if len(busy) != ranks or not max(busy, default=0.0):
        return whole, 1.0
    nodes = [[busy[rank] for rank in _ranks_in(place.ranks, ranks)] for place in figures.placement]
    heaviest = max(map(statistics.fmean, filter(None, nodes)), default=statistics.fmean(busy))
    between = min(statistics.fmean(busy) / heaviest, 1.0)
    return min(whole / between, 1.0), between


def _ranks_in(text: str, count: int) -> list[int]:
    """Return the ranks of a text as "0-3,8" that are below ``count``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), min(int(last or first) + 1, count))
    return found


_SPECIAL = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "|": r"\textbar{}",
}
_HEADINGS = (
    *("ranks", "nodes", "batch", "step (ms)", "samples/s", "speed-up", "efficiency"),
    *("PE", "CS"),
)
_NONE = "--"


def latex_text(study: ScalingStudy) -> str:
    """Return one ``table`` with a ``tabular`` for each kind of scaling that has sizes."""
    kinds = [kind for kind in study.request.kinds if study.of_kind(kind)]
    return "\n".join(_latex_table(study, kind) for kind in kinds)


def escape(text: str) -> str:
    """Return text in which no character is a command of LaTeX."""
    return "".join(_SPECIAL.get(sign, sign) for sign in printable(text))


def _latex_table(study: ScalingStudy, kind: str) -> str:
    rows = size_rows(study, kind)
    lines = [
        "% Written by paceline scale. It needs no package.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(study, kind, rows)}}}",
        rf"\label{{tab:scaling-{kind}}}",
        r"\footnotesize\setlength{\tabcolsep}{2pt}% it fits the text width of article",
        rf"\begin{{tabular}}{{{'r' * len(_HEADINGS)}}}",
        r"\hline",
        " & ".join(_HEADINGS) + r" \\",
        r"\hline",
        *(" & ".join(_latex_cells(row)) + r" \\" for row in rows),
        r"\hline",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _caption(study: ScalingStudy, kind: str, rows: list[SizeRow]) -> str:
    same = "the same global batch" if kind == STRONG else "the same batch per rank"
    first = next((row.point.ranks for row in rows if row.throughput is not None), None)
    runs = [len(row.point.runs) for row in rows if row.point.runs]
    counts = f"{min(runs)} to {max(runs)} runs" if len(set(runs)) > 1 else ""
    counts = counts or (counted(runs[0], "run") if runs else "no run")
    against = f" Speed-up and efficiency are relative to {counted(first, 'rank')}." if first else ""
    return (
        f"{kind.capitalize()} scaling of {escape(study.file_name)}: {same} on all numbers of "
        f"ranks. Medians of {counts} per size; $\\pm$: half of the 90\\,\\% confidence interval."
        f"{against} PE: parallel efficiency, CS: computation scalability (POP)."
    )


def _latex_cells(row: SizeRow) -> list[str]:
    point = row.point
    head = [str(point.ranks), str(point.hosts), str(point.setup.global_batch)]
    if row.throughput is None:
        failed = "failed" if point.failure else "not measured"
        return [*head, rf"\multicolumn{{{len(_HEADINGS) - 3}}}{{l}}{{{failed}}}"]
    return [
        *head,
        _with_interval(row.step.times(1e3) if row.step is not None else None),
        _with_interval(row.throughput),
        _with_interval(row.speedup),
        _with_interval(row.efficiency),
        _factor(row.pop.get("parallel")),
        _factor(row.computation),
    ]


def _with_interval(found: Estimate | None) -> str:
    """Return the value with as many digits as its interval has significant ones."""
    if found is None:
        return _NONE
    half = (found.high - found.low) / 2
    digits = decimals(found.value, half)
    value = f"{found.value:.{digits}f}"
    if not half or half == float("inf"):
        return f"${value}$"
    return rf"${value} \pm {half:.{digits}f}$"


def decimals(value: float, half: float) -> int:
    """Return the number of decimals that show two digits of ``half``, or four of ``value``."""
    scale, digits = (half, 2) if 0 < half < float("inf") else (abs(value), 4)
    for count in range(7):
        if scale * 10**count >= 10 ** (digits - 1):
            return count
    return 6


def _factor(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def study_json(study: ScalingStudy, findings: Findings) -> dict[str, Any]:
    """Return the study as a tree of JSON; numbers that are infinite or unknown are None."""
    sizes = []
    for kind in study.request.kinds:
        ends = {target.point.setup: target for target in targets(study, kind)}
        sizes += [_size(row, ends.get(row.point.setup)) for row in size_rows(study, kind)]
    tree = {
        "format": "paceline-scale",
        "version": 1,
        "folder": study.folder,
        "command": [study.request.script, *study.request.args],
        "batch": asdict(study.batch) if study.batch is not None else None,
        "efficiency": study.request.efficiency,
        "sizes": sizes,
        "knees": [asdict(knee) for knee in findings.knees],
        "reasons": [asdict(reason) for reason in findings.reasons],
        "fits": [asdict(fit) for fit in findings.fits],
        "curves": [asdict(curve) for curve in findings.curves],
        "predictions": [
            {
                **asdict(checked.prediction),
                "high": checked.high,
                "measured": checked.measured.value if checked.measured is not None else None,
                "error": checked.error,
                "inside": checked.is_inside,
            }
            for checked in findings.predictions
        ],
        "target": _target(study),
        "larger_batches": {
            kind: asdict(advice)
            for kind in study.request.kinds
            if (advice := batch_advice(study, kind)) is not None
        },
        "notes": study.notes,
    }
    found: dict[str, Any] = finite(tree)
    return found


def _size(row: SizeRow, end: SizeTarget | None) -> dict[str, Any]:
    point = row.point
    return {
        "scaling": point.kind,
        "ranks": point.ranks,
        "nodes": point.hosts,
        "layout": point.layout or None,
        "global_batch": point.setup.global_batch,
        "rank_batch": point.setup.rank_batch,
        "runs": len(point.runs),
        "failed_runs": point.failed_runs,
        "failure": point.failure,
        "step_s": _estimate(row.step),
        "samples_per_s": _estimate(row.throughput),
        "speedup": _estimate(row.speedup),
        "scaling_efficiency": _estimate(row.efficiency),
        "computation_scalability": row.computation,
        "global_efficiency": row.global_efficiency,
        "pop": row.pop,
        "states_s": row.states,
        "memory_bytes": row.memory_bytes,
        "device_bytes": row.device_bytes,
        "energy": asdict(row.energy) if row.energy is not None else None,
        "node_hours_per_million_samples": row.node_hours_per_million,
        "target": _size_target(end) if end is not None else None,
        "placement": [asdict(place) for run in point.figures[:1] for place in run.placement],
    }


def _size_target(end: SizeTarget) -> dict[str, Any]:
    return {
        "seeds": end.seeds,
        "reached": end.reached,
        **{
            name: _estimate(getattr(end, name))
            for name in ("samples", "statistical_efficiency", "seconds", "node_hours")
        },
        "best": end.best,
        "learning_rate": end.learning_rate,
        "predicted_efficiency": end.predicted_efficiency,
    }


def _target(study: ScalingStudy) -> dict[str, Any] | None:
    goal = goal_of(study)
    if goal is None:
        return None
    found = {}
    for kind in study.request.kinds:
        sizes = targets(study, kind)
        first, cheap = soonest(sizes), cheapest(sizes)
        found[kind] = {
            "soonest_ranks": first.point.ranks if first is not None else None,
            "cheapest_ranks": cheap.point.ranks if cheap is not None else None,
            "learning_rate_rule": learning_rate_rule(sizes),
        }
    return {"goal": str(goal), **found}


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    return asdict(found) if found is not None else None
