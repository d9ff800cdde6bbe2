"""Page of one run."""

import math
from collections.abc import Mapping
from typing import Any

from ...analyze.figures.report import Report, RunAnalysis
from ...analyze.records.state_timeline import STATES
from ...cost.roofline import Roof, RooflinePoint, ridge
from ..exchange_tables import (
    MAX_LISTED_ON_PAGE,
    axes_table,
    blocks_table,
    exposed_blocks,
    halos_table,
    layers_table,
)
from ..numbers import counted
from ..sentences import (
    cause,
    core_wait_sentence,
    memory_warnings,
    noise_scale_sentence,
    outliers,
    peak_sentence,
    pipeline_sentences,
    troubles,
)
from ..state_names import shown_states, state_name
from ..terminal import step_work
from ..terminal.run_report import EFFICIENCY_TREE, has_efficiency
from ..verdict.of_run import verdict_of_run
from .series import figures, series
from .wording import achieved, largest_losses
from .write_page import page

SHOWN_GROUPS = 40
# Names of definitions of efficiencies that have the same name as a state.
_KEYS = {
    "transfer": "transfer efficiency",
    "useful": "useful share",
    **{
        name: f"no {name}"
        for name in ("checkpoint", "validation", "input", "starved", "other", "bubble")
    },
}
LONGER = {  # what a late rank did longer, as the tooltip of its bar
    "useful": "it computed longer",
    "input": "it waited longer for its batch",
    "checkpoint": "it saved a checkpoint",
    "validation": "it evaluated the model",
    "starved": "it waited for a core",
    "other": "it did other work of the script",
    "bubble": "it waited for another stage of its pipeline",
    "wait": "it waited for another rank",
    "transfer": "its previous collective took longer",
}
_PARTS = (
    ("summary", "Summary", lambda found: True),
    ("efficiencies", "Efficiencies", lambda found: found["report"].efficiencies),
    ("states", "Ranks", lambda found: found["report"].efficiencies),
    ("steps", "Step times", lambda found: found["report"].step_times),
    ("waiting", "Waiting", lambda found: found["charts_of"].get("waiting")),
    ("whom", "Stragglers", lambda found: found["charts_of"].get("pairs")),
    ("pipeline", "Pipeline", lambda found: found["report"].pipeline),
    ("collectives", "Collectives", lambda found: found["report"].groups),
    ("blocks", "Sharded blocks", lambda found: found["report"].blocks),
    ("moments", "Timeline", lambda found: found["charts_of"].get("moments")),
    ("work", "FLOPs", lambda found: found["report"].work),
    ("places", "Nodes", lambda found: True),
    ("trust", "Reliability", lambda found: True),
)


def single(examined: RunAnalysis) -> str:
    """Return the page of one run as HTML."""
    report = examined.report
    charts = series(examined)
    context = _context(report, charts)
    context["parts"] = [(key, name) for key, name, there in _PARTS if there(context)]
    return page("single.html", {**charts, **_data(report)}, context)


def _data(report: Report) -> dict[str, Any]:
    """Return the data of the charts that ``series`` does not contain."""
    found: dict[str, Any] = {"longer": LONGER}
    if report.states:
        found["shares"] = {
            "ranks": report.ranks,
            "shares": {s: [round(rank[s], 5) for rank in report.states] for s in STATES},
        }
    if report.step_times is not None:
        found["medianStep"] = report.step_times.median_s
        found["outliers"] = [
            {"step": one.step, "seconds": one.seconds, "text": cause(one, report)}
            for one in report.step_times.outliers
        ]
    if report.roofline is not None:
        found["roofline"] = roofline_chart(report.roofline.roofs, report.roofline.points)
    return found


def _context(report: Report, charts: dict[str, Any]) -> dict[str, Any]:
    told = largest_losses(report)
    lost = sum(loss.share for loss in report.losses)
    count = len(report.states)
    return {
        "report": report,
        "title": f"Paceline: {report.name}",
        "heading": f"Where the time of {counted(report.size, 'rank')} went",
        "achieved": achieved(report),
        "conclusion": verdict_of_run(report),
        "grown": memory_warnings(report),
        "core_waits": core_wait_sentence(report),
        "noise_scale": noise_scale_sentence(noise) if (noise := report.noise_scale) else None,
        "peak": peak_sentence(report),
        "told": told,
        "rest": lost - sum(loss.share for loss in told),
        "tree": list(tree(report)),
        "states": [(name, state_name(report, name)) for name in shown_states(report.states)],
        "mean": {s: sum(rank[s] for rank in report.states) / count for s in STATES}
        if count
        else {},
        "charts_of": dict.fromkeys(("waiting", "pairs", "moments", "schedule")) | charts,
        "axes": axes_table(report),
        "groups": _groups(report),
        "shown_groups": SHOWN_GROUPS,
        "blocks": blocks_table(report, MAX_LISTED_ON_PAGE),
        "layers": layers_table(report, MAX_LISTED_ON_PAGE),
        "halos": halos_table(report, MAX_LISTED_ON_PAGE),
        "exposed_blocks": exposed_blocks(report),
        "pipeline": pipeline_sentences(report),
        "outliers": [*troubles(report), *outliers(report)],
        "charts_in": {key: [] for key, *_ in _PARTS} | figures(report, charts),
        "worked": step_work.sentences(report),
        "reaches": step_work.reaches,
    }


def tree(report: Report) -> Any:
    """Yield the efficiencies that the report has.

    Each is a tuple of name, field, name of the definition, depth in the tree, and value.
    """
    for name, field, depth in EFFICIENCY_TREE:
        if has_efficiency(report, field):
            value = getattr(report.efficiencies, field)
            yield name, field, _KEYS.get(field, field), depth, value


def _groups(report: Report) -> list[dict[str, Any]]:
    """Return the process groups with their index in the JSON.

    They are sorted by wait and transfer time, the largest first.
    """
    order = sorted(enumerate(report.groups), key=lambda one: -(one[1].wait + one[1].transfer))
    return [{"place": place, **vars(group)} for place, group in order]


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
