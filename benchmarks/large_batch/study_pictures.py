"""Pictures of the study of convergence."""

import statistics
from pathlib import Path
from typing import Any

import plotly.graph_objects as plots
from figures import COLORS, bars, draw_figures
from plotly.subplots import make_subplots

LAYOUT = {
    "width": 900,
    "height": 460,
    "margin": {"l": 70, "r": 20, "t": 70, "b": 60},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
}


def draw_study(
    folder: Path,
    points: dict[str, Any],
    batches: dict[str, Any],
    predictions: list[dict[str, Any]],
    reference_batch: int,
) -> None:
    figures = {
        "large-batches-curves": _curves(points),
        "large-batches-sizes": _sizes(points, batches, reference_batch),
        "large-batches-steps": _steps(predictions),
    }
    draw_figures(folder, figures)


def _curves(points: dict[str, Any]) -> Any:
    figure = plots.Figure(layout=LAYOUT)
    for (name, point), color in zip(points.items(), COLORS, strict=False):
        found = bars([[100 * error for error in curve] for curve in point["curves"]])
        epochs = list(range(1, 1 + len(found["y"])))
        figure.add_scatter(x=epochs, **found, name=name, line={"color": color})
    figure.update_xaxes(title="epoch", dtick=1)
    figure.update_yaxes(title="validation error, %")
    return figure


def _sizes(points: dict[str, Any], batches: dict[str, Any], reference_batch: int) -> Any:
    figure = plots.Figure(layout=LAYOUT)
    colors = dict(zip(points, COLORS, strict=False))
    for rule, of_batches in batches.items():
        runs = [[100 * error for error in run] for run in zip(*of_batches.values(), strict=True)]
        sizes = [reference_batch * int(times) for times in of_batches]
        figure.add_scatter(x=sizes, **bars(runs), name=rule, line={"color": colors[rule]})
    tuned = [name for name in points if name.endswith("tuned")]
    for number, name in enumerate(tuned):
        # beside each other, so that none hides another
        x = points[name]["settings"]["batch"] * 1.06 ** (number - len(tuned) / 2)
        found = bars([[100 * error] for error in points[name]["test"]])
        marker = {"color": colors[name], "size": 9, "symbol": number}
        figure.add_scatter(x=[x], **found, name=name, mode="markers", marker=marker)
    figure.update_xaxes(title="samples in a batch", type="log", tickvals=sizes)
    figure.update_yaxes(title="test error, %", type="log", tickvals=[30, 40, 50, 60, 70, 80])
    return figure


def _steps(predictions: list[dict[str, Any]]) -> Any:
    titles = [f"{case['task']}: loss {case['target']:g}" for case in predictions]
    figure = make_subplots(1, len(predictions), subplot_titles=titles)
    for column, case in enumerate(predictions, 1):
        rows = case["rows"]
        where: dict[str, Any] = {"row": 1, "col": column}
        once: dict[str, Any] = {"showlegend": column == 1}
        sizes = [row["batch"] for row in rows]
        low, high, middle = (
            [row.get(key) or found(row["measured"]) for row in rows]  # of the reference: measured
            for key, found in (("low", min), ("high", max), ("predicted", statistics.median))
        )
        figure.add_scatter(
            x=sizes + sizes[::-1], y=high + low[::-1], fill="toself", mode="none", name="band",
            fillcolor="rgba(86, 180, 233, 0.35)", **once, **where,
        )  # fmt: skip
        line = {"color": COLORS[5]}
        figure.add_scatter(
            x=sizes, y=middle, mode="lines", line=line, name="predicted", **once, **where
        )
        found = bars([list(run) for run in zip(*(row["measured"] for row in rows), strict=True)])
        marker = {"color": COLORS[1], "size": 7}
        figure.add_scatter(
            x=sizes, **found, mode="markers", marker=marker, name="measured", **once, **where
        )
        figure.update_xaxes(tickvals=sizes, **where)
    figure.update_layout({**LAYOUT, "margin": {**LAYOUT["margin"], "t": 90}})
    figure.update_layout(legend={"orientation": "h", "y": 1.12, "yanchor": "bottom"})
    figure.update_xaxes(title="samples in a batch", type="log")
    figure.update_yaxes(type="log")
    figure.update_yaxes(title="steps to the loss", row=1, col=1)
    return figure
