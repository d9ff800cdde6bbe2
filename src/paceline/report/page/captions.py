"""Captions of the charts, one or two sentences each, which screen readers also read."""

from typing import Any

from ...analyze.figures.report import Report
from ...analyze.figures.steps import StepTimes
from ..numbers import counted, duration, percent


def of(report: Report, charts: dict[str, Any]) -> dict[str, str]:
    """Return the captions of the charts that the page has, by name of the chart."""
    found = {}
    if report.states:
        found["states"] = _states(report)
    if report.step_times is not None:
        found["steps"] = _steps(report.step_times)
        found["marks"] = _marks(report.step_times, bool(charts.get("steps", {}).get("together")))
    if "waiting" in charts:
        found["waiting"] = _waiting(report, charts["waiting"]["together"])
    if "pairs" in charts:
        found["pairs"] = "Who waited for whom, of the waiting rank's time."
        if charts["pairs"]["together"]:
            found["pairs"] += " Neighbouring ranks are one cell, with their mean."
        found["most"] = _most(report)
        late = charts["late"]["names"]
        found["late"] = f"Most waiting was caused by {late[0]}" if late else "Nobody was late"
    return found


def _states(report: Report) -> str:
    useful = [rank["useful"] for rank in report.states]
    if len(useful) == 1:
        return f"Useful time is {percent(useful[0])} of the rank's time."
    least = report.ranks[useful.index(min(useful))]
    most = percent(max(useful))
    return f"Useful time is {percent(min(useful))} (rank {least}) to {most} of a rank's time."


def _steps(times: StepTimes) -> str:
    out = "none stands out"
    if times.outlier_count:
        stand = "stands" if times.outlier_count == 1 else "stand"
        steps = counted(times.last - times.first + 1, "step")
        out = f"{times.outlier_count} of {steps} {stand} out"
    between = f"{duration(times.p5_s)} and {duration(times.p95_s)}"
    return f"Median {duration(times.median_s)}, nine of ten steps between {between}; {out}."


def _marks(times: StepTimes, together: bool) -> str:
    shown, parts = len(times.outliers), []
    if shown < times.outlier_count:
        parts.append(f"Diamonds are the {shown} longest of those that stand out.")
    elif shown:
        parts.append("Diamonds are steps that stand out.")
    if together:
        parts.append(
            "The line is the median of neighbours, the band from their least to their most."
        )
    return " ".join(parts)


def _waiting(report: Report, together: bool) -> str:
    wait = [rank["wait"] for rank in report.states]
    return (
        "A rank that waits little while the others wait is the late one. Waiting is "
        f"{percent(min(wait))} to {percent(max(wait))} of a rank's time."
        + (" Neighbouring steps or ranks are one cell." if together else "")
    )


def _most(report: Report) -> str:
    if not report.waited_for:
        return "Nobody waited for anybody"
    first = report.waited_for[0]
    share = percent(first.share)
    return f"Most: rank {first.rank} waited for rank {first.waited_for} during {share} of its time"
