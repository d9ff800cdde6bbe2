"""Plain-text drawing of a roofline, with two logarithmic axes."""

import math
from collections.abc import Mapping

from ..cost.machine.units import format_value
from ..cost.roofline import Roof, RooflinePoint

_MIN_COLUMNS_ROWS = (32, 8)
_LABEL_COLUMNS = 13  # left of the axis
_MAX_RATIO_BELOW = 100  # slower points than the roofs' lowest one divided by this are at the edge
_MARKS = "abcdefghijklmnopqrstuvwxyz"


def draw_roofline(
    roofs: Mapping[str, Roof],
    points: Mapping[str, RooflinePoint],
    width: int = 78,
    height: int = 18,
) -> str:
    """Draw the roof of each precision and the measured points; "" if there is no roof.

    The name of a roof is at its right end. Each point is a letter, which a line below explains.
    width, height: Size in characters.
    """
    if not roofs:
        return ""
    names = {name: f" {name} {format_value(roof.peak, 'FLOP/s')}" for name, roof in roofs.items()}
    columns = max(width - _LABEL_COLUMNS - 2 - max(map(len, names.values())), _MIN_COLUMNS_ROWS[0])
    x, y = _axes(roofs, points, columns, max(height - 2, _MIN_COLUMNS_ROWS[1]))
    field = [[" "] * columns for _ in range(y.cells)]
    right = [""] * y.cells
    for name, roof in sorted(roofs.items(), key=lambda item: -item[1].peak):
        _draw_roof(field, roof, x, y)
        _place_name(right, y.at(roof.peak), names[name])
    for mark, placed in zip(_MARKS, points.values(), strict=False):
        field[y.at(placed.rate)][x.at(placed.intensity)] = mark
    lines = ["FLOP/s".rjust(_LABEL_COLUMNS)]
    ticks = {y.at(10.0**power): power for power in y.powers()}
    for row in reversed(range(y.cells)):
        label = format_value(10.0 ** ticks[row], "FLOP/s") if row in ticks else ""
        axis = "+" if row in ticks else "|"
        lines.append(f"{label:>{_LABEL_COLUMNS}} {axis}{''.join(field[row])}{right[row]}".rstrip())
    lines += _x_axis(x, columns)
    for mark, (name, placed) in zip(_MARKS, points.items(), strict=False):
        lines.append(f"  {mark}  {name}: {_point_in_words(placed)}")
    return "\n".join(lines) + "\n"


class _Axis:
    """A logarithmic axis from one power of ten to another, divided into cells."""

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
        share = cell / (self.cells - 1)
        return float(10 ** (self.first + share * (self.last - self.first)))

    def powers(self) -> range:
        """Return the powers of ten that are labelled: every second or third if there are many."""
        return range(self.first, self.last + 1, 1 + (self.last - self.first) // 8)


def _axes(
    roofs: Mapping[str, Roof], points: Mapping[str, RooflinePoint], columns: int, rows: int
) -> tuple[_Axis, _Axis]:
    """Return the x and y axes, which contain all ridges and points with a margin at both sides."""
    finite = [p.intensity for p in points.values() if 0 < p.intensity < float("inf")]
    across = [math.log10(v) for v in [*finite, *(r.peak / r.bandwidth for r in roofs.values())]]
    x = _Axis(min(min(across) - 0.5, -1), max(across) + 1, columns)
    least = min(min(r.peak, 10.0**x.first * r.bandwidth) for r in roofs.values())
    rates = [least, *(max(p.rate, least / _MAX_RATIO_BELOW) for p in points.values())]
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
    """Put a roof's name beside its row, or a row below if another name is there."""
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


def _point_in_words(placed: RooflinePoint) -> str:
    much = placed.intensity
    intensity = f"{much:,.0f} FLOP/byte" if much >= 100 else f"{much:.3g} FLOP/byte"
    if math.isinf(much):
        intensity = "no memory traffic"
    limit = "memory bandwidth" if placed.bound == "memory" else "arithmetic"
    return (
        f"{intensity}, {format_value(placed.rate, 'FLOP/s')}, {100 * placed.share:.0f} % of what "
        f"{limit} allows"
    )
