"""The page of one run."""

from typing import Any

from ...analyze.report import Examined, Report
from ...analyze.states import STATES
from ..numbers import counted, duration, percent
from ..sentences import cause, outliers
from ..terminal import NEEDS_TWO, TREE
from .series import series
from .words import achieved, largest
from .write import page

SHOWN_GROUPS = 40
# Where the tree of efficiencies has a name that a state has too, its definition is another one.
_KEYS = {
    "transfer": "transfer efficiency",
    "useful": "useful share",
    **{name: f"no {name}" for name in ("checkpoint", "validation", "input", "other")},
}
LONGER = {  # what a late rank did, for those who hover over its bar
    "useful": "it computed longer",
    "input": "it had waited for its batch",
    "checkpoint": "it had been saving",
    "validation": "it had been evaluating",
    "other": "the script's own work",
    "wait": "it had waited itself",
    "transfer": "it had exchanged elsewhere",
}
_PARTS = (
    ("summary", "Summary", lambda found: True),
    ("efficiencies", "Efficiencies", lambda found: found["report"].efficiencies),
    ("states", "Ranks", lambda found: found["report"].efficiencies),
    ("steps", "Step times", lambda found: found["report"].step_times),
    ("waiting", "Waiting", lambda found: found["charts_of"].get("waiting")),
    ("whom", "For whom", lambda found: found["charts_of"].get("pairs")),
    ("collectives", "Collectives", lambda found: found["report"].groups),
    ("moments", "Timeline", lambda found: found["charts_of"].get("moments")),
    ("places", "Hosts", lambda found: True),
    ("trust", "Trust", lambda found: True),
)


def single(examined: Examined) -> str:
    """The page of one run, as HTML."""
    report = examined.report
    charts = series(examined)
    context = _context(report, charts)
    context["parts"] = [(key, name) for key, name, there in _PARTS if there(context)]
    return page("single.html", {**charts, **_data(report)}, context)


def _data(report: Report) -> dict[str, Any]:
    """What the charts need beside the series."""
    found: dict[str, Any] = {"longer": LONGER}
    if report.states:
        found["shares"] = {
            "ranks": report.ranks,
            "shares": {s: [round(rank[s], 5) for rank in report.states] for s in STATES},
        }
    if report.step_times is not None:
        found["medianStep"] = report.step_times.median_s
        found["outliers"] = [
            {"step": one.step, "seconds": one.seconds, "text": cause(one)}
            for one in report.step_times.outliers
        ]
    return found


def _context(report: Report, charts: dict[str, Any]) -> dict[str, Any]:
    told = largest(report)
    lost = sum(loss.share for loss in report.losses)
    count = len(report.states)
    return {
        "report": report,
        "title": f"Paceline: {report.name}",
        "heading": f"Where the time of {counted(report.size, 'rank')} went",
        "achieved": achieved(report),
        "told": told,
        "rest": lost - sum(loss.share for loss in told),
        "tree": list(tree(report)),
        "states": [(name, state_name(report, name)) for name in STATES],
        "mean": {s: sum(rank[s] for rank in report.states) / count for s in STATES}
        if count
        else {},
        "charts_of": dict.fromkeys(("waiting", "pairs", "moments")) | charts,
        "groups": _groups(report),
        "shown_groups": SHOWN_GROUPS,
        "outliers": outliers(report),
        **_captions(report, charts),
    }


def tree(report: Report) -> Any:
    """The efficiencies that there are: name, field, definition, depth, value."""
    for name, field, depth in TREE:
        value = getattr(report.efficiencies, field, None)
        if value is not None and not (report.size == 1 and field in NEEDS_TWO):
            yield name, field, _KEYS.get(field, field), depth, value


def state_name(report: Report, name: str) -> str:
    """Where clocks could not be aligned, wait and transfer are one."""
    return name if report.clocks_aligned or name != "transfer" else "wait or transfer"


def _groups(report: Report) -> list[dict[str, Any]]:
    """Groups by what their members lost in them, with their place in the JSON."""
    order = sorted(enumerate(report.groups), key=lambda one: -(one[1].wait + one[1].transfer))
    return [{"place": place, **vars(group)} for place, group in order]


def _captions(report: Report, charts: dict[str, Any]) -> dict[str, str]:
    found = dict.fromkeys(
        ("states_caption", "steps_caption", "outlier_note", "waiting_caption"), ""
    ) | dict.fromkeys(("pairs_caption", "pairs_label", "late_label"), "")
    if report.states:
        useful = [rank["useful"] for rank in report.states]
        least = report.ranks[useful.index(min(useful))]
        found["states_caption"] = (
            f"Useful time is {percent(min(useful))} (rank {least}) to {percent(max(useful))} of a "
            "rank's time."
            if len(useful) > 1
            else f"Useful time is {percent(useful[0])} of the rank's time."
        )
    if (times := report.step_times) is not None:
        out = f"{times.outlier_count} of {times.last - times.first + 1} steps stand out"
        found["steps_caption"] = (
            f"Median {duration(times.median_s)}, nine of ten steps between "
            f"{duration(times.p5_s)} and {duration(times.p95_s)}; "
            f"{out if times.outlier_count else 'none stands out'}."
        )
        shown = len(times.outliers)
        found["outlier_note"] = "Diamonds are steps that stand out." if shown else ""
        if shown < times.outlier_count:
            found["outlier_note"] = f"Diamonds are the {shown} longest of those that stand out."
        if charts.get("steps", {}).get("together"):
            found["outlier_note"] += (
                " The line is the median of neighbours, the band from their least to their most."
            )
    if "waiting" in charts:
        together = (
            " Neighbouring steps or ranks are one cell." if charts["waiting"]["together"] else ""
        )
        wait = [rank["wait"] for rank in report.states]
        found["waiting_caption"] = (
            f"A rank that waits little while the others wait is the late one. Waiting is "
            f"{percent(min(wait))} to {percent(max(wait))} of a rank's time.{together}"
        )
    if "pairs" in charts:
        blocks = (
            " Neighbouring ranks are one cell, with their mean."
            if charts["pairs"]["together"]
            else ""
        )
        found["pairs_caption"] = f"Who waited for whom, of the waiting rank's time.{blocks}"
        if report.waited_for:
            first = report.waited_for[0]
            found["pairs_label"] = (
                f"Most: rank {first.rank} waited for rank {first.waited_for} during "
                f"{percent(first.share)} of its time"
            )
        late = charts["late"]["names"]
        found["late_label"] = f"Most waiting was caused by {late[0]}" if late else "Nobody was late"
    return found
