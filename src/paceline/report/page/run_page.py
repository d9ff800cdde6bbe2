"""Page of one run, and the data of its charts, small enough for 512 ranks with 10,000 steps.

Nothing is sampled: if there is more data than can be shown, neighbours are aggregated, and the
chart has both their mean and their worst value.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analyze.figures.measured_window import MeasuredWindow, wait_matrix
from ...analyze.figures.pipeline import STAGE, micro_batch_events, stages_of
from ...analyze.figures.report import RunAnalysis
from ...analyze.figures.steps import states_by_step
from ...analyze.figures.window_steps import Steps
from ...analyze.records.state_timeline import STATES, Window
from ...cost.roofline import Roof, RooflinePoint, ridge
from ...record.ring.states import BACKWARD_PARTS, PARTS_PER_CHUNK, State
from ..figure_names import STATE_NAMES
from ..run_document import run_document
from ..sentences import LATE_BECAUSE, cause

COLUMNS = 400  # of a map: steps, or parts of one step
ROWS = 1024  # of a map: ranks
POINTS = 1000  # of the line of step times
PAIRS = 64  # ranks, or blocks of them, that the matrix shows
MAX_BARS = 4000  # of the picture of a schedule
LATE = 15  # ranks whose lateness has a bar of its own
FULL = 250  # stands for a share of 1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """Blocks of aggregated neighbours: block i is the range from edges[i] to edges[i + 1] - 1."""

    edges: npt.NDArray[np.int64]

    @classmethod
    def of(cls, count: int, most: int) -> "Blocks":
        return cls(np.unique(np.linspace(0, count, min(count, most) + 1).astype(np.int64)))

    def __len__(self) -> int:
        return len(self.edges) - 1

    def names(self, numbers: list[int]) -> list[str]:
        """Return the label of each block, as "8" or "8-15"."""
        pairs = zip(self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True)
        ends = [(numbers[first], numbers[last - 1]) for first, last in pairs]
        return [f"{first}" if first == last else f"{first}-{last}" for first, last in ends]


def single(examined: RunAnalysis) -> str:
    """Return the page of one run as HTML."""
    from .write_page import document_page  # templates load slowly

    charts = series(examined)
    return document_page(run_document(examined.report, charts), charts)


def series(examined: RunAnalysis) -> dict[str, Any]:
    """Return all data that charts.js draws."""
    report, m = examined.report, examined.measured
    longer = {s: f"it {LATE_BECAUSE[s]}" for s in STATES}
    longer["input"] = "it waited longer for its batch"
    longer["transfer"] = "its previous collective took longer"
    found: dict[str, Any] = {"longer": longer}
    if report.roofline is not None:
        found["roofline"] = roofline_chart(report.roofline.roofs, report.roofline.points)
    if report.states:
        shares = {s: [round(rank[s], 5) for rank in report.states] for s in STATES}
        found["shares"] = {"ranks": report.ranks, "shares": shares}
    if report.step_times is not None:
        found["medianStep"] = report.step_times.median_s
        found["outliers"] = [
            {"step": outlier.step, "seconds": outlier.seconds, "text": cause(outlier, report)}
            for outlier in report.step_times.outliers
        ]
    if m is None:
        return found
    found |= {"states": list(STATES), "stateNames": STATE_NAMES, "ranks": report.ranks}
    steps = m.steps
    if steps is not None:
        found |= {"steps": times(steps), "moments": moments(m, steps, examined)}
        found |= {"waiting": waiting(m, steps)} if len(m.records) > 1 else {}
    if len(m.records) > 1 and not m.clocks_unaligned:
        found |= {"pairs": who(m), "late": late(examined)}
    if steps is not None and report.pipeline is not None:
        found |= {"schedule": schedule(m, steps, examined)}
    return found


def schedule(m: MeasuredWindow, steps: Steps, examined: RunAnalysis) -> dict[str, Any]:
    """Return the micro-batches of the typical step: in each rank of one pipeline, by time.

    Rows have the stage; ``bars`` the row, start and end (ms), name, and whether it is a forward.
    """
    found = examined.report.step_times
    assert found is not None
    stages = stages_of(m.records)
    at = {record.rank: number for number, record in enumerate(m.records)}
    first = min(stages, key=lambda rank: (stages[rank], rank))
    places = examined.report.mesh
    beside = [axis for axis in places[first] if axis != STAGE]
    shown = [r for r in stages if all(places[r][a] == places[first][a] for a in beside)]
    shown.sort(key=lambda rank: stages[rank])
    begin, end = steps.span(found.typical)
    bars: list[tuple[int, float, float, str, bool]] = []
    for row, rank in enumerate(shown):
        events = micro_batch_events(m.records[at[rank]], Window(begin, end))
        names = ("state", "start", "end", "seq", "amount")
        for state, start, stop, number, amount in events[list(names)].tolist():
            chunk, part = divmod(amount, PARTS_PER_CHUNK)
            is_forward = state == State.FORWARD
            kind = "F" if is_forward else BACKWARD_PARTS.get(part, "B")
            times_ms = (_digits((start - begin) / 1e6), _digits((stop - begin) / 1e6))
            bars.append((row, *times_ms, f"{kind}{number - 1}{chr(39) * chunk}", is_forward))
    return {
        "step": found.typical,
        "rows": [f"stage {stages[rank]}" for rank in shown],
        "bars": bars[:MAX_BARS],
        "is_cut": len(bars) > MAX_BARS,
    }


def times(steps: Steps) -> dict[str, Any]:
    """Return the step times in s: of each step, or median, minimum and maximum of neighbours."""
    blocks = Blocks.of(len(steps), POINTS)
    edges = blocks.edges
    parts = np.split(steps.seconds, edges[1:-1])
    numbers = range(steps.first, steps.first + len(steps))
    return {
        "names": blocks.names(list(numbers)),
        "at": (steps.first + (edges[:-1] + edges[1:] - 1) / 2).tolist(),
        "median": [_digits(float(np.median(part))) for part in parts],
        "least": [_digits(float(part.min())) for part in parts],
        "most": [_digits(float(part.max())) for part in parts],
        "together": len(blocks) < len(steps),
    }


def waiting(m: MeasuredWindow, steps: Steps) -> dict[str, Any]:
    """Return the map of waiting: shares of each rank's step, mean and maximum of neighbours."""
    columns, rows = Blocks.of(len(steps), COLUMNS), Blocks.of(len(m.records), ROWS)
    mean, worst = np.zeros((2, len(m.records), len(columns)))
    for i in range(len(m.records)):
        wait = states_by_step(m, steps, i)[:, STATES.index("wait")]
        length = np.maximum(np.diff(steps.bounds[i]), 1)
        starts = columns.edges[:-1]
        mean[i] = np.add.reduceat(wait, starts) / np.add.reduceat(length, starts)
        worst[i] = np.maximum.reduceat(wait / length, starts)
    starts, count = rows.edges[:-1], np.diff(rows.edges)[:, None]
    numbers = list(range(steps.first, steps.first + len(steps)))
    return {
        "rows": rows.names([record.rank for record in m.records]),
        "columns": columns.names(numbers),
        "mean": _packed(np.add.reduceat(mean, starts, axis=0) / count),
        "worst": _packed(np.maximum.reduceat(worst, starts, axis=0)),
        "together": len(columns) < len(steps) or len(rows) < len(m.records),
    }


def who(m: MeasuredWindow) -> dict[str, Any]:
    """Return who waited (rows) for whom (columns), as shares of the waiting rank's time.

    For blocks of ranks, the share is the mean over the waiting ranks.
    """
    shares = wait_matrix(m)
    blocks = Blocks.of(len(shares), PAIRS)
    starts = blocks.edges[:-1]
    summed = np.add.reduceat(np.add.reduceat(shares, starts, axis=0), starts, axis=1)
    summed /= np.diff(blocks.edges)[:, None]
    most = float(summed.max())
    return {
        "names": blocks.names([record.rank for record in m.records]),
        "most": most,
        "shares": _packed(summed / most if most else summed),
        "together": len(blocks) < len(shares),
    }


def late(examined: RunAnalysis) -> dict[str, Any]:
    """Return the waiting that each rank caused, as shares of all ranks' time, by its late state."""
    shares: dict[int, dict[str, float]] = {}
    for loss in examined.report.losses:
        if loss.kind == "wait" and loss.rank is not None and loss.doing is not None:
            doing = shares.setdefault(loss.rank, {})
            doing[loss.doing] = doing.get(loss.doing, 0.0) + loss.share
    order = sorted(shares, key=lambda rank: -sum(shares[rank].values()))
    names = [examined.report.named([rank]) for rank in order[:LATE]]
    bars = [shares[rank] for rank in order[:LATE]]
    if rest := order[LATE:]:
        names.append(f"{len(rest)} others")
        bars.append({s: sum(shares[rank].get(s, 0.0) for rank in rest) for s in STATES})
    return {
        "names": names,
        "shares": {state: [_digits(bar.get(state, 0.0)) for bar in bars] for state in STATES},
    }


def moments(m: MeasuredWindow, steps: Steps, examined: RunAnalysis) -> list[dict[str, Any]]:
    """Return the states of all ranks during the typical, the best and the worst step."""
    found = examined.report.step_times
    assert found is not None
    rows = Blocks.of(len(m.records), ROWS)
    result = []
    for kind, step in (("typical", found.typical), ("best", found.best), ("worst", found.worst)):
        start, end = steps.span(step)
        edges = np.linspace(start, end, COLUMNS + 1).astype(np.int64)
        spans = np.stack([np.diff(line.cumulative_by_state(edges), axis=0) for line in m.timelines])
        spans = np.add.reduceat(spans, rows.edges[:-1], axis=0)
        state = np.where(spans.sum(axis=2) > 0, spans.argmax(axis=2), FULL + 1)
        result.append(
            {
                "kind": kind,
                "step": step,
                "seconds": _digits(float(steps.seconds[step - steps.first])),
                "span_ms": (end - start) / 1e6,
                "rows": rows.names([record.rank for record in m.records]),
                "state": _base64(state.astype(np.uint8)),
                "columns": COLUMNS,
            }
        )
    return result


def _packed(shares: Floats) -> str:
    """Encode shares of 0 to 1 as bytes of 0 to ``FULL``, row by row; small shares become 1."""
    scaled = np.rint(np.clip(shares, 0, 1) * FULL)
    return _base64(np.where((shares > 1e-4) & (scaled < 1), 1, scaled).astype(np.uint8))


def _base64(values: npt.NDArray[np.uint8]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


# Positions of neighbouring labels, which differ so that the labels do not overlap.
_AROUND = ("bottom center", "top center", "middle left", "middle right")


def roofline_chart(
    roofs: Mapping[str, Roof], points: Mapping[str, RooflinePoint]
) -> dict[str, Any]:
    """Return ``data`` and ``layout`` of the chart; empty if there is no roof.

    Work without memory traffic is drawn at the right edge.
    """
    if not roofs:
        return {}
    ridges = {name: ridge(roof.peak, roof.bandwidth) for name, roof in roofs.items()}
    known = [placed.intensity for placed in points.values()]
    finite = [value for value in known if 0 < value < math.inf]
    left, right = min([0.1, *finite]) / 2, 10 * max([*ridges.values(), *finite])
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [left, ridges[name], right],
            "y": [left * roof.bandwidth, roof.peak, roof.peak],
        }
        for name, roof in roofs.items()
    ]
    if points:
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": "measured",
                "x": [min(value, right) for value in known],
                "y": [placed.rate for placed in points.values()],
                "text": list(points),
                "textposition": [_AROUND[i % len(_AROUND)] for i in range(len(points))],
            }
        )
    layout = {
        "xaxis": {"type": "log", "title": {"text": "FLOP/byte"}},
        "yaxis": {"type": "log", "title": {"text": "FLOP/s"}, "exponentformat": "SI"},
    }
    return {"data": data, "layout": layout}
