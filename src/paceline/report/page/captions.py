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
    if "schedule" in charts:
        found["schedule"] = (
            f"Micro-batches of step {charts['schedule']['step']}, as they ran: F forward, B "
            "backward, I backward of the activations, W backward of the parameters, ' second "
            "virtual stage. Stages wait where a row is empty."
        )
        if charts["schedule"]["is_cut"]:
            found["schedule"] += " Only the first ones of the step are shown."
    if "pairs" in charts:
        found["pairs"] = "Share of its time that each rank waited for each other rank."
        if charts["pairs"]["together"]:
            found["pairs"] += " Each cell is the mean of neighbouring ranks."
        found["most"] = _most(report)
        late = charts["late"]["names"]
        found["late"] = (
            f"{late[0].capitalize()} caused the most waiting" if late else "No rank was late"
        )
    return found


def _states(report: Report) -> str:
    useful = [rank["useful"] for rank in report.states]
    if len(useful) == 1:
        return f"Useful time is {percent(useful[0])} of the rank's time."
    least = report.ranks[useful.index(min(useful))]
    most = percent(max(useful))
    named = report.named([least])
    return f"Useful time is {percent(min(useful))} ({named}) to {most} of a rank's time."


def _steps(times: StepTimes) -> str:
    steps = counted(times.last - times.first + 1, "step")
    percentiles = f"{duration(times.p5_s)} to {duration(times.p95_s)}"
    return (
        f"Median {duration(times.median_s)}, 5th to 95th percentile {percentiles}, "
        f"{counted(times.outlier_count, 'outlier')} in {steps}."
    )


def _marks(times: StepTimes, together: bool) -> str:
    shown, parts = len(times.outliers), []
    if shown < times.outlier_count:
        parts.append(f"Diamonds mark the {shown} longest outliers.")
    elif shown:
        parts.append("Diamonds mark outliers.")
    if together:
        parts.append(
            "The line is the median of neighbouring steps. The band reaches from their minimum to "
            "their maximum."
        )
    return " ".join(parts)


def _waiting(report: Report, together: bool) -> str:
    wait = [rank["wait"] for rank in report.states]
    return (
        "The rank that waits least while the others wait is the straggler. Ranks wait for "
        f"{percent(min(wait))} to {percent(max(wait))} of their time."
        + (" Each cell combines neighbouring steps or ranks." if together else "")
    )


def _most(report: Report) -> str:
    if not report.waited_for:
        return "No rank waited for another rank"
    first = report.waited_for[0]
    share = percent(first.share)
    waited = f"{report.named([first.rank])} waited for {report.named([first.waited_for])}"
    return f"Largest wait: {waited} during {share} of its time"
