"""Roofline chart of the page, as traces and layout for plotly.js."""

import math
from collections.abc import Mapping
from typing import Any

from ...cost.roofline import Roof, RooflinePoint, ridge

# Positions of neighbouring labels, which differ so that the labels do not overlap.
_AROUND = ("bottom center", "top center", "middle left", "middle right")


def chart(roofs: Mapping[str, Roof], points: Mapping[str, RooflinePoint]) -> dict[str, Any]:
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
