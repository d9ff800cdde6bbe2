"""Charts of scaling studies on a page: lines over ranks with their intervals, and states."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.targets import targets
from ...analyze.scaling.study_model import STRONG, ScalingStudy
from ...security.text import printable
from ..figure_names import STATE_NAMES
from .findings import Curve, Findings
from .size_rows import SizeRow, size_rows, unmeasured

MAX_SHARE = 10.0  # of an interval's end to its value: beyond, the interval is not drawn
Points = list[tuple[SizeRow, Estimate | None]]


def study_charts(study: ScalingStudy, findings: Findings) -> dict[str, Any]:
    """Return the data of the charts of a study.

    Raises:
        ValueError: No size was measured.
    """
    measured = {kind: measured_rows(study, kind) for kind in study.request.kinds}
    if not any(measured.values()):
        raise unmeasured(study)
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
    known = [(row, estimate) for row, estimate in points if estimate is not None]
    drawn = [
        estimate if estimate.low > 0 and estimate.high < MAX_SHARE * estimate.value else None
        for _, estimate in known
    ]
    return {
        "name": name,
        "colour": number,
        "x": [row.point.ranks for row, _ in known],
        "y": [estimate.value for _, estimate in known],
        "above": [estimate.high - estimate.value if estimate else 0.0 for estimate in drawn],
        "below": [estimate.value - estimate.low if estimate else 0.0 for estimate in drawn],
    }


def _fitted(curve: Curve, number: int, base: float, per_rank: bool) -> dict[str, Any]:
    """Return a fitted curve in multiples of ``base`` samples/s (of a rank)."""
    low, middle, high = _relative(curve, base, per_rank)
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


def _relative(curve: Curve, base: float, per_rank: bool) -> list[list[float]]:
    """Return low end, value and high end of a curve in multiples of ``base`` (of a rank)."""
    return [
        [x / base / (n if per_rank else 1) for x, n in zip(values, curve.ranks, strict=True)]
        for values in (curve.low, curve.values, curve.high)
    ]


def losses_of(rows: Sequence[SizeRow]) -> dict[str, Any]:
    """Return the seconds per step and rank in each state, by size."""
    return {
        "ranks": [row.point.ranks for row in rows],
        "seconds": {state: [row.states.get(state, 0.0) for row in rows] for state in STATES},
    }


def _costs(study: ScalingStudy, kind: str, rows: Sequence[SizeRow]) -> tuple[Points, Points]:
    """Return time and node-hours to the target, or for a million samples without one."""
    if ends := {target.point.setup: target for target in targets(study, kind)}:
        both = [(row, ends.get(row.point.setup)) for row in rows]
        return (
            [(row, target.seconds if target is not None else None) for row, target in both],
            [(row, target.node_hours if target is not None else None) for row, target in both],
        )
    million = Estimate(1e6, 1e6, 1e6, 2)
    seconds = [(row, million.over(row.throughput)) for row in rows if row.throughput]
    hours = [(row, found.times(row.point.hosts / 3600)) for row, found in seconds]
    return [*seconds], [*hours]


WIDTH, HEIGHT = 760, 340
PANEL_WIDTH, PANEL_HEIGHT = 290, 230
LEFTS, TOP = (60, 440), 50
# Colours of the Okabe-Ito palette, and markers, which also differ in print without colours.
COLOURS = {"strong": "#0072b2", "weak": "#d55e00"}
IDEAL, GRID, INK = "#55606c", "#d5d9df", "#1b1f24"
DASH, DOTS = "6 4", "2 3"
MAX_RATIO = 1e4  # of an interval's end to its value: beyond, it is not drawn
LOWEST_BAR = 1 / 16  # speed-up to which the axis goes down for a confidence interval


@dataclass(frozen=True)
class _Panel:
    """A drawing area with its axes.

    Attributes:
        left: Pixels.
        x, y: Smallest and largest value of each axis.
        log: Whether the vertical axis is logarithmic; the horizontal one always is.
    """

    left: int
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a point; values outside lie on the border."""
        return (
            self.left + PANEL_WIDTH * _share(x, self.x, True),
            TOP + PANEL_HEIGHT * (1 - _share(y, self.y, self.log)),
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
        """Return a line through points."""
        more = {"stroke_dasharray": dash} if dash else {}
        line = {"fill": "none", "stroke": colour, "stroke_width": 1.5, **more}
        return _tag("polyline", points=self._path(points), **line)

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
    ) -> str:
        """Return the area between two lines."""
        there = list(zip(xs, high, strict=True))
        back = list(zip(xs, low, strict=True))[::-1]
        path = self._path([*there, *back])
        return _tag("polygon", points=path, fill=colour, fill_opacity="0.12", stroke="none")

    def _path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)


def _tag(name: str, text: str = "", /, **attributes: object) -> str:
    """Return an element of an SVG; lengths have one decimal."""
    words = [
        f'{key.replace("_", "-")}="{value:.1f}"'
        if isinstance(value, float)
        else f'{key.replace("_", "-")}="{value}"'
        for key, value in attributes.items()
    ]
    start = f"<{name} {' '.join(words)}"
    return f"{start}>{text}</{name}>" if text else f"{start}/>"


def _rule(x: tuple[float, float], y: tuple[float, float], stroke: str, /, **more: object) -> str:
    """Return a straight line from (x[0], y[0]) to (x[1], y[1])."""
    return _tag("line", x1=x[0], x2=x[1], y1=y[0], y2=y[1], stroke=stroke, **more)


def _label(x: float, y: float, text: str, /, **more: object) -> str:
    return _tag("text", text, x=x, y=y, **more, fill=INK)


def svg_text(study: ScalingStudy, findings: Findings) -> str:
    """Return the SVG: points with intervals, the ideal line, fitted curves with their bands.

    Raises:
        ValueError: No size was measured.
    """
    kinds = {kind: _measured(study, kind) for kind in study.request.kinds}
    kinds = {kind: rows for kind, rows in kinds.items() if rows}
    if not kinds:
        raise unmeasured(study)
    ranks = sorted({row.point.ranks for rows in kinds.values() for row in rows})
    most = max([*ranks, *(c.ranks[-1] for c in findings.curves if c.kind in kinds)])
    span = (float(ranks[0]), float(max(most, 2 * ranks[0])))
    title = f"Scaling of {printable(study.file_name)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" role="img" '
        f"aria-label={quoteattr(title)}>",
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_speedup(kinds, findings, ranks, span),
        *_efficiency(kinds, findings, ranks, span),
        *_legend(list(kinds), bool(findings.curves)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _measured(study: ScalingStudy, kind: str) -> list[SizeRow]:
    return [row for row in size_rows(study, kind) if row.speedup is not None]


def _speedup(
    kinds: dict[str, list[SizeRow]], findings: Findings, ranks: list[int], span: tuple[float, float]
) -> list[str]:
    top = span[1] / span[0]
    low = _lowest_speedup(kinds, findings)
    panel = _Panel(LEFTS[0], span, (low, top), log=True)
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(top)) + 1)]
    found = _axes(panel, ranks, [t for t in ticks if low <= t <= top], "Speed-up", "{:g}".format)
    ideal = [(rank, rank / span[0]) for rank in span]
    found.append(panel.line(ideal, IDEAL, DASH))
    for kind, rows in kinds.items():
        first = rows[0].throughput
        assert first is not None
        found += _curves(panel, findings, kind, first.value, per_rank=False)
        found += _points(panel, kind, [(row.point.ranks, row.speedup) for row in rows])
    return found


def _lowest_speedup(kinds: dict[str, list[SizeRow]], findings: Findings) -> float:
    """Return the lower end of the axis: a fitted line that is cut there would look level."""
    lowest = 1.0
    for kind, rows in kinds.items():
        first = rows[0].throughput
        assert first is not None
        fitted = [min(curve.values) / first.value for curve in findings.of_kind(kind).curves]
        measured = [speedup for row in rows if (speedup := row.speedup)]
        lowest = min(lowest, *fitted, *(speedup.value for speedup in measured))
        lows = (speedup.low for speedup in measured if speedup.high < MAX_RATIO * speedup.value)
        lowest = min([lowest, *(max(low, LOWEST_BAR) for low in lows)])
    return lowest


def _efficiency(
    kinds: dict[str, list[SizeRow]], findings: Findings, ranks: list[int], span: tuple[float, float]
) -> list[str]:
    values = [e.value for rows in kinds.values() for row in rows if (e := row.efficiency)]
    top = max(1.1, 1.05 * max(values))
    panel = _Panel(LEFTS[1], span, (0.0, top), log=False)
    ticks = [0.2 * i for i in range(math.floor(top / 0.2) + 1)]
    found = _axes(panel, ranks, ticks, "Scaling efficiency", "{:.1f}".format)
    found.append(panel.line([(rank, 1.0) for rank in span], IDEAL, DASH))
    for kind, rows in kinds.items():
        first = rows[0].throughput
        assert first is not None
        base = first.value / rows[0].point.ranks
        found += _curves(panel, findings, kind, base, per_rank=True)
        found += _points(panel, kind, [(row.point.ranks, row.efficiency) for row in rows])
    return found


def _axes(
    panel: _Panel, ranks: list[int], ticks: list[float], title: str, label: Callable[[float], str]
) -> list[str]:
    bottom, right = TOP + PANEL_HEIGHT, panel.left + PANEL_WIDTH
    found = [_label(panel.left, TOP - 10, title, font_weight="bold")]
    for tick in ticks:
        y = panel.at(panel.x[0], tick)[1]
        found.append(_rule((panel.left, right), (y, y), GRID))
        found.append(_label(panel.left - 6, y + 4, label(tick), text_anchor="end"))
    for rank in ranks:
        x = panel.at(rank, panel.y[0])[0]
        found.append(_rule((x, x), (bottom, bottom + 4), INK))
        found.append(_label(x, bottom + 18, str(rank), text_anchor="middle"))
    found.append(_rule((panel.left, right), (bottom, bottom), INK))
    middle = (panel.left + right) / 2
    return [*found, _label(middle, bottom + 36, "ranks", text_anchor="middle")]


def _curves(panel: _Panel, findings: Findings, kind: str, base: float, per_rank: bool) -> list[str]:
    """Return the fitted curves of a kind, in multiples of ``base`` samples/s (of a rank)."""
    found = []
    for curve in findings.of_kind(kind).curves:
        low, middle, high = _relative(curve, base, per_rank)
        found.append(panel.band(curve.ranks, low, high, COLOURS[kind]))
        points = list(zip(curve.ranks, middle, strict=True))
        found.append(panel.line(points, COLOURS[kind], DOTS))
    return found


def _points(panel: _Panel, kind: str, points: list[tuple[int, Estimate | None]]) -> list[str]:
    colour = COLOURS[kind]
    known = [(ranks, estimate) for ranks, estimate in points if estimate is not None]
    found = [panel.line([(ranks, estimate.value) for ranks, estimate in known], colour)]
    for ranks, estimate in known:
        x, y = panel.at(ranks, estimate.value)
        if estimate.low > 0 and estimate.high < MAX_RATIO * estimate.value:
            low, high = panel.at(ranks, estimate.low)[1], panel.at(ranks, estimate.high)[1]
            found.append(_rule((x, x), (low, high), colour, stroke_width=1.5))
            ends = ((end, end) for end in (low, high))
            found += [_rule((x - 4, x + 4), end, colour, stroke_width=1.5) for end in ends]
        found.append(_marker(kind, x, y))
    return found


def _marker(kind: str, x: float, y: float) -> str:
    colour = COLOURS[kind]
    if kind == STRONG:
        return _tag("circle", cx=x, cy=y, r=4, fill=colour)
    return _tag("rect", x=x - 4, y=y - 4, width=8, height=8, fill=colour)


def _legend(kinds: list[str], fitted: bool) -> list[str]:
    found, x, y = [], 60.0, 18.0
    for kind in kinds:
        found.append(_marker(kind, x, y - 4))
        found.append(_label(x + 10, y, f"{kind} scaling"))
        x += 130
    lines = [("ideal", DASH, IDEAL)] + ([("fitted", DOTS, INK)] if fitted else [])
    for name, dash, colour in lines:
        style = {"stroke_width": 1.5, "stroke_dasharray": dash}
        found.append(_rule((x, x + 28), (y - 4, y - 4), colour, **style))
        found.append(_label(x + 34, y, name))
        x += 100
    return [*found, _label(x, y, "bars: 90 % confidence intervals")]


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    """Return where a value lies between the ends of an axis, from 0 to 1."""
    low, high = ends
    if log:
        value, low, high = (math.log(max(x, 1e-300)) for x in (value, low, high))
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5
