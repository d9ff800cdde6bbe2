"""The roofline: the ridge point, the position of a piece of work, and the drawing."""

import json

import plotly.graph_objects
import pytest
from machines import Maker

from paceline.cost.roofline import Roof, attainable, place, ridge, roofs
from paceline.report.page.run_page import roofline_chart
from paceline.report.roofline import draw_roofline

A100 = {"float64": Roof(9.7e12, 1.555e12), "bfloat16": Roof(312e12, 1.555e12)}


def test_performance_is_memory_bound_below_ridge_point():
    assert ridge(10e12, 2e12) == 5
    assert attainable(1, 10e12, 2e12) == 2e12
    assert attainable(5, 10e12, 2e12) == attainable(500, 10e12, 2e12) == 10e12
    assert attainable(0, 10e12, 2e12) == 0
    assert attainable(float("inf"), 10e12, 2e12) == 10e12


def test_work_is_placed_on_roofline():
    stream = place(2e9, 24e9, 0.02, peak=10e12, bandwidth=2e12)
    assert stream.bound == "memory"
    assert stream.intensity == pytest.approx(1 / 12)
    assert stream.share == pytest.approx(0.6)
    product = place(1e12, 1e9, 0.2, peak=10e12, bandwidth=2e12)
    assert (product.bound, product.limit) == ("compute", 10e12)
    assert product.share == pytest.approx(0.5)
    assert place(1e12, 0, 1, peak=10e12, bandwidth=2e12).bound == "compute"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": 0}, r"flops=0 is not a positive number. HINT"),
        ({"bytes_moved": -1}, r"bytes_moved=-1 is negative. HINT"),
        ({"seconds": 0}, r"seconds=0 is not a positive"),
        ({"peak": float("nan")}, r"peak=nan is not a positive"),
        ({"bandwidth": float("inf")}, r"bandwidth=inf is not a positive"),
    ],
)
def test_invalid_work_is_rejected(change, message):
    good = {"flops": 1, "bytes_moved": 1, "seconds": 1, "peak": 1, "bandwidth": 1}
    with pytest.raises(ValueError, match=message):
        place(**(good | change))


def test_roofs_are_those_of_the_device():
    host = Maker(1, noise=1e-4, apart=0).host("a", gpus=1)
    assert list(roofs(host)) == ["float32", "float64"]
    assert roofs(host, "cuda:0")["float32"].peak == pytest.approx(2e12, rel=1e-3)
    assert roofs(host, "cuda:1") == {}


def lines_of(roofs, points, **size):
    return draw_roofline(roofs, points, **size).splitlines()


def test_drawing_has_roofs_names_and_points():
    norm = place(1e9, 8e9, 8e9 / 1.2e12, peak=312e12, bandwidth=1.555e12)
    product = place(1e13, 1e10, 0.05, peak=312e12, bandwidth=1.555e12)
    lines = lines_of(A100, {"layer norm": norm, "product": product})
    assert all(len(line) <= 88 for line in lines)
    assert all(line.isascii() for line in lines)
    high, low = (
        next(row for row, line in enumerate(lines) if line.endswith(end))
        for end in (" bfloat16 312 TFLOP/s", " float64 9.7 TFLOP/s")
    )
    assert high < low
    field = [line[15:50] for line in lines if line[14:15] in ("|", "+")]
    assert sum("a" in row for row in field) == sum("b" in row for row in field) == 1
    assert "  a  layer norm: 0.125 FLOP/byte, 150 GFLOP/s, 77 % of what memory bandwidth" in (
        "\n".join(lines)
    )
    assert lines[-1].startswith("  b  product: 1,000 FLOP/byte, 200 TFLOP/s, 64 % of what arithm")


def test_drawn_slope_ends_at_ridge_point():
    lines = lines_of({"float32": Roof(1e12, 1e11)}, {}, width=110, height=30)
    top = next(line for line in lines if "float32" in line)
    axis = next(line for line in lines if line.rstrip().endswith("+") and "-+-" in line)
    ten = [i for i, c in enumerate(axis) if c == "+"][lines[-1].split().index("10") + 1]
    assert abs(top.index("-") - ten) <= 2  # the ridge is at 10 FLOP/byte


def test_drawing_edge_cases():
    assert draw_roofline({}, {}) == ""
    slow = place(1, 0, 1, peak=1e12, bandwidth=1e11)
    lines = lines_of({"float32": Roof(1e12, 1e11)}, {"slow": slow}, width=10, height=3)
    assert "no memory traffic, 1 FLOP/s, 0 % of what arithmetic allows" in lines[-1]
    assert len(lines) == 8 + 4
    equal = lines_of({"float16": Roof(1e12, 1e11), "bfloat16": Roof(1e12, 1e11)}, {})
    assert sum("1 TFLOP/s" in line and "float16" in line for line in equal) == 2


def test_plotly_accepts_roofline_chart():
    free = place(1e12, 0, 1, peak=312e12, bandwidth=1.555e12)
    made = roofline_chart(A100, {"free": free})
    drawn = plotly.graph_objects.Figure(json.loads(json.dumps(made, allow_nan=False)))
    assert [trace.name for trace in drawn.data] == ["float64", "bfloat16", "measured"]
    assert drawn.data[1].y[-2:] == (312e12, 312e12)
    assert drawn.data[2].x[0] == drawn.data[0].x[-1]
    assert roofline_chart({}, {}) == {}
