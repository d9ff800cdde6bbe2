"""Speed-up and efficiency of a study as one SVG, for documents."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.study_model import STRONG, ScalingStudy
from ...security.text import printable
from .findings import Findings
from .size_rows import SizeRow, size_rows

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
        path = " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        return (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashed}/>'
        )

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
    ) -> str:
        """Return the area between two lines."""
        there = list(zip(xs, high, strict=True))
        back = list(zip(xs, low, strict=True))[::-1]
        path = " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in [*there, *back])
        return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.12" stroke="none"/>'


def svg_text(study: ScalingStudy, findings: Findings) -> str:
    """Return the SVG: points with intervals, the ideal line, fitted curves with their bands.

    Raises:
        ValueError: No size was measured.
    """
    kinds = {kind: _measured(study, kind) for kind in study.request.kinds}
    kinds = {kind: rows for kind, rows in kinds.items() if rows}
    if not kinds:
        raise ValueError(
            f"{study.folder} has no measured size. HINT: paceline scale --continue {study.folder}"
        )
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
        fitted = [min(one.values) / first.value for one in findings.curves if one.kind == kind]
        measured = [one for row in rows if (one := row.speedup)]
        lowest = min(lowest, *fitted, *(one.value for one in measured))
        lows = (one.low for one in measured if one.high < MAX_RATIO * one.value)
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
    found = [
        f'<text x="{panel.left}" y="{TOP - 10}" font-weight="bold" fill="{INK}">{title}</text>',
    ]
    for tick in ticks:
        y = panel.at(panel.x[0], tick)[1]
        found.append(
            f'<line x1="{panel.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
            f'<text x="{panel.left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">'
            f"{label(tick)}</text>"
        )
    for rank in ranks:
        x = panel.at(rank, panel.y[0])[0]
        found.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="{INK}"/>'
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="{INK}">{rank}</text>'
        )
    found.append(
        f'<line x1="{panel.left}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="{INK}"/>'
        f'<text x="{(panel.left + right) / 2}" y="{bottom + 36}" text-anchor="middle" '
        f'fill="{INK}">ranks</text>'
    )
    return found


def _curves(panel: _Panel, findings: Findings, kind: str, base: float, per_rank: bool) -> list[str]:
    """Return the fitted curves of a kind, in multiples of ``base`` samples/s (of a rank)."""
    found = []
    for curve in findings.curves:
        if curve.kind == kind:
            low, middle, high = (
                [
                    x / base / (n if per_rank else 1)
                    for x, n in zip(values, curve.ranks, strict=True)
                ]
                for values in (curve.low, curve.values, curve.high)
            )
            xs = [float(n) for n in curve.ranks]
            found.append(panel.band(xs, low, high, COLOURS[kind]))
            points = list(zip(xs, middle, strict=True))
            found.append(panel.line(points, COLOURS[kind], DOTS))
    return found


def _points(panel: _Panel, kind: str, points: list[tuple[int, Estimate | None]]) -> list[str]:
    colour = COLOURS[kind]
    known = [(ranks, one) for ranks, one in points if one is not None]
    found = [panel.line([(ranks, one.value) for ranks, one in known], colour)]
    for ranks, one in known:
        x, y = panel.at(ranks, one.value)
        if one.low > 0 and one.high < MAX_RATIO * one.value:
            low, high = panel.at(ranks, one.low)[1], panel.at(ranks, one.high)[1]
            found += [
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                f'stroke="{colour}" stroke-width="1.5"/>',
                *(
                    f'<line x1="{x - 4:.1f}" x2="{x + 4:.1f}" y1="{end:.1f}" y2="{end:.1f}" '
                    f'stroke="{colour}" stroke-width="1.5"/>'
                    for end in (low, high)
                ),
            ]
        found.append(_marker(kind, x, y))
    return found


def _marker(kind: str, x: float, y: float) -> str:
    colour = COLOURS[kind]
    if kind == STRONG:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>'


def _legend(kinds: list[str], fitted: bool) -> list[str]:
    found, x, y = [], 60.0, 18.0
    for kind in kinds:
        found.append(_marker(kind, x, y - 4))
        found.append(f'<text x="{x + 10}" y="{y}" fill="{INK}">{kind} scaling</text>')
        x += 130
    lines = [("ideal", DASH, IDEAL)] + ([("fitted", DOTS, INK)] if fitted else [])
    for name, dash, colour in lines:
        found.append(
            f'<line x1="{x}" x2="{x + 28}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="1.5" stroke-dasharray="{dash}"/>'
            f'<text x="{x + 34}" y="{y}" fill="{INK}">{name}</text>'
        )
        x += 100
    text = "bars: 90 % confidence intervals"
    found.append(f'<text x="{x}" y="{y}" fill="{INK}">{text}</text>')
    return found


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    """Return where a value lies between the ends of an axis, from 0 to 1."""
    low, high = ends
    if log:
        value, low, high = (math.log(max(one, 1e-300)) for one in (value, low, high))
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5
