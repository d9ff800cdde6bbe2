"""Charts of scaling studies on a page: lines over ranks with their intervals, and states."""

import math
from collections.abc import Sequence
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.targets import targets
from ...analyze.scaling.study_model import ScalingStudy
from ..state_names import STATE_NAMES
from .findings import Curve, Findings
from .size_rows import SizeRow, size_rows

MAX_SHARE = 10.0  # of an interval's end to its value: beyond, the interval is not drawn
Points = list[tuple[SizeRow, Estimate | None]]


def study_charts(study: ScalingStudy, findings: Findings) -> dict[str, Any]:
    """Return the data of the charts of a study.

    Raises:
        ValueError: No size was measured.
    """
    measured = {kind: measured_rows(study, kind) for kind in study.request.kinds}
    if not any(measured.values()):
        raise ValueError(
            f"{study.folder} has no measured size. HINT: paceline scale --continue {study.folder}"
        )
    ranks = sorted({row.point.ranks for rows in measured.values() for row in rows})
    ideal = [ranks[0], max(ranks)]
    speedup = [{"name": "ideal", "x": ideal, "y": [n / ranks[0] for n in ideal], "ideal": True}]
    efficiency = [{"name": "ideal", "x": ideal, "y": [1.0, 1.0], "ideal": True}]
    time, cost = [], []
    for number, (kind, rows) in enumerate(measured.items()):
        if not rows:
            continue
        name, first = f"{kind} scaling", rows[0]
        speedup.append(line_of(name, number, [(row, row.speedup) for row in rows]))
        efficiency.append(line_of(name, number, [(row, row.efficiency) for row in rows]))
        assert first.throughput is not None
        base = first.throughput.value
        for curve in findings.of_kind(kind).curves:
            each = base / first.point.ranks
            speedup.append(_fitted(curve, number, base, per_rank=False))
            efficiency.append(_fitted(curve, number, each, per_rank=True))
        times, hours = _costs(study, kind, rows)
        time.append(line_of(name, number, times))
        cost.append(line_of(name, number, hours))
    return {
        "states": list(STATES),
        "stateNames": STATE_NAMES,
        "bands": {
            "studySpeedup": {"ranks": ranks, "lines": speedup, "title": "speed-up", "log": True},
            "studyEfficiency": {"ranks": ranks, "lines": efficiency, "title": "scaling efficiency"},
            "studyTime": {"ranks": ranks, "lines": time, "title": "time (s)", "log": True},
            "studyCost": {"ranks": ranks, "lines": cost, "title": "node-hours", "log": True},
        },
        "losses": {kind: losses_of(rows) for kind, rows in measured.items() if rows},
    }


def measured_rows(study: ScalingStudy, kind: str) -> list[SizeRow]:
    """Return the sizes of a kind that have figures."""
    return [row for row in size_rows(study, kind) if row.throughput is not None]


def line_of(name: str, number: int, points: Points) -> dict[str, Any]:
    """Return a line of a chart. number: Of its colour. points: Value of each size."""
    known = [(row, one) for row, one in points if one is not None]
    drawn = [one if one.low > 0 and one.high < MAX_SHARE * one.value else None for _, one in known]
    return {
        "name": name,
        "colour": number,
        "x": [row.point.ranks for row, _ in known],
        "y": [one.value for _, one in known],
        "above": [one.high - one.value if one else 0.0 for one in drawn],
        "below": [one.value - one.low if one else 0.0 for one in drawn],
    }


def _fitted(curve: Curve, number: int, base: float, per_rank: bool) -> dict[str, Any]:
    """Return a fitted curve in multiples of ``base`` samples/s (of a rank)."""
    low, middle, high = (
        [x / base / (n if per_rank else 1) for x, n in zip(values, curve.ranks, strict=True)]
        for values in (curve.low, curve.values, curve.high)
    )
    high = [min(end, MAX_SHARE * x) for end, x in zip(high, middle, strict=True)]
    found = [low, middle, high]
    if not all(math.isfinite(x) for values in found for x in values):
        found = [middle, middle, middle]
    return {
        "name": f"{curve.kind} scaling, {curve.model}",
        "colour": number,
        "x": curve.ranks,
        "low": found[0],
        "y": found[1],
        "high": found[2],
        "fitted": True,
    }


def losses_of(rows: Sequence[SizeRow]) -> dict[str, Any]:
    """Return the seconds per step and rank in each state, by size."""
    return {
        "ranks": [row.point.ranks for row in rows],
        "seconds": {state: [row.states.get(state, 0.0) for row in rows] for state in STATES},
    }


def _costs(study: ScalingStudy, kind: str, rows: Sequence[SizeRow]) -> tuple[Points, Points]:
    """Return time and node-hours to the target, or for a million samples without one."""
    if ends := {one.point.setup: one for one in targets(study, kind)}:
        both = [(row, ends.get(row.point.setup)) for row in rows]
        return (
            [(row, one.seconds if one is not None else None) for row, one in both],
            [(row, one.node_hours if one is not None else None) for row, one in both],
        )
    million = Estimate(1e6, 1e6, 1e6, 2)
    seconds = [(row, million.over(row.throughput)) for row in rows if row.throughput]
    hours = [(row, found.times(row.point.hosts / 3600)) for row, found in seconds]
    return [*seconds], [*hours]
