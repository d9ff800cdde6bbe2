"""Plain-text drawing of a roofline, with two logarithmic axes."""

import math
from collections.abc import Mapping

from ..cost.machine.units import format_value
from ..cost.roofline import Roof, RooflinePoint

_MIN_COLUMNS, _MIN_ROWS = 32, 8
_LABEL_COLUMNS = 13  # left of the axis
# The y axis reaches down to the lowest roof divided by this; slower points are drawn at its end.
_MAX_RATIO_BELOW = 100
_MARKS = "abcdefghijklmnopqrstuvwxyz"  # points beyond the 26th are not drawn


def draw_roofline(
    roofs: Mapping[str, Roof],
    points: Mapping[str, RooflinePoint],
    width: int = 78,
    height: int = 18,
) -> str:
    """Return a drawing of the roof of each precision and the measured points; "" without a roof.

    The name of a roof is at its right end. Each point is a letter, which a line below explains.

    Args:
        roofs: Roofs by name of the precision.
        points: Points by name.
        width, height: Size in characters.
    """
    if not roofs:
        return ""
    names = {name: f" {name} {format_value(roof.peak, 'FLOP/s')}" for name, roof in roofs.items()}
    columns = max(width - _LABEL_COLUMNS - 2 - max(map(len, names.values())), _MIN_COLUMNS)
    x, y = _axes(roofs, points, columns, max(height - 2, _MIN_ROWS))
    field = [[" "] * columns for _ in range(y.cells)]
    right = [""] * y.cells
    for name, roof in sorted(roofs.items(), key=lambda item: -item[1].peak):
        _draw_roof(field, roof, x, y)
        _place_name(right, y.at(roof.peak), names[name])
    for mark, point in zip(_MARKS, points.values(), strict=False):
        field[y.at(point.rate)][x.at(point.intensity)] = mark
    lines = ["FLOP/s".rjust(_LABEL_COLUMNS)]
    ticks = {y.at(10.0**power): power for power in y.powers()}
    for row in reversed(range(y.cells)):
        label = format_value(10.0 ** ticks[row], "FLOP/s") if row in ticks else ""
        axis = "+" if row in ticks else "|"
        lines.append(f"{label:>{_LABEL_COLUMNS}} {axis}{''.join(field[row])}{right[row]}".rstrip())
    lines += _x_axis(x, columns)
    for mark, (name, point) in zip(_MARKS, points.items(), strict=False):
        lines.append(f"  {mark}  {name}: {_describe_point(point)}")
    return "\n".join(lines) + "\n"


class _Axis:
    """A logarithmic axis from one power of ten to another, divided into cells.

    Args:
        low, high: Base-10 logarithms of values that the axis contains.
        cells: Number of character cells.
    """

    def __init__(self, low: float, high: float, cells: int) -> None:
        self.first, self.last = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
        self.cells = cells

    def at(self, value: float) -> int:
        """Return the cell of a value, or the nearest cell for a value outside of the axis."""
        if value <= 0:
            return 0
        if math.isinf(value):
            return self.cells - 1
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return min(max(round(share * (self.cells - 1)), 0), self.cells - 1)

    def value(self, cell: int) -> float:
        """Return the value at a cell."""
        share = cell / (self.cells - 1)
        return float(10 ** (self.first + share * (self.last - self.first)))

    def powers(self) -> range:
        """Return the exponents of the powers of ten that are labelled: at most about nine."""
        return range(self.first, self.last + 1, 1 + (self.last - self.first) // 8)


def _axes(
    roofs: Mapping[str, Roof], points: Mapping[str, RooflinePoint], columns: int, rows: int
) -> tuple[_Axis, _Axis]:
    """Return the x and y axes.

    They contain all ridges, and all points except those of _MAX_RATIO_BELOW, with a margin.
    """
    finite = [p.intensity for p in points.values() if 0 < p.intensity < float("inf")]
    ridges = [r.peak / r.bandwidth for r in roofs.values()]
    logs = [math.log10(intensity) for intensity in [*finite, *ridges]]
    x = _Axis(min(min(logs) - 0.5, -1), max(logs) + 1, columns)
    lowest_roof = min(min(r.peak, 10.0**x.first * r.bandwidth) for r in roofs.values())
    rates = [lowest_roof, *(max(p.rate, lowest_roof / _MAX_RATIO_BELOW) for p in points.values())]
    top = max([r.peak for r in roofs.values()] + rates)
    return x, _Axis(math.log10(min(rates)), math.log10(top) + 0.05, rows)


def _draw_roof(field: list[list[str]], roof: Roof, x: _Axis, y: _Axis) -> None:
    for column in range(x.cells):
        slope = x.value(column) * roof.bandwidth
        mark = "/" if slope < roof.peak else "-"
        row = y.at(min(roof.peak, slope))
        if field[row][column] == " ":
            field[row][column] = mark


def _place_name(right: list[str], row: int, name: str) -> None:
    """Write a roof's name right of its row, or of the next row below without a name.

    The name is left out if all rows below have names.
    """
    while row > 0 and right[row]:
        row -= 1
    right[row] = right[row] or name


def _x_axis(x: _Axis, columns: int) -> list[str]:
    ticks, labels = ["-"] * columns, [" "] * (columns + 8)
    for power in x.powers():
        at = x.at(10.0**power)
        ticks[at] = "+"
        label = f"{10.0**power:g}"
        labels[at : at + len(label)] = list(label)
    start = " " * (_LABEL_COLUMNS + 1)
    under = f"{start} {''.join(labels).rstrip()}"
    return [f"{start}+{''.join(ticks)}", f"{under}  FLOP/byte"]


def _describe_point(point: RooflinePoint) -> str:
    value = point.intensity
    intensity = f"{value:,.0f} FLOP/byte" if value >= 100 else f"{value:.3g} FLOP/byte"
    if math.isinf(value):
        intensity = "no memory traffic"
    limit = "memory bandwidth" if point.bound == "memory" else "arithmetic"
    return (
        f"{intensity}, {format_value(point.rate, 'FLOP/s')}, {100 * point.share:.0f} % of what "
        f"{limit} allows"
    )
