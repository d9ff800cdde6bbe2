"""A loss in a sentence: what it is, whose, where, in which steps and in which collective."""

from pathlib import Path

from ..analyze.losses import Loss
from ..analyze.report import Report

_DOING = {
    "useful": "computed longer",
    "input": "had waited for its batch",
    "checkpoint": "had been saving",
    "validation": "had been evaluating",
    "other": "had been in the script's own work",
    "wait": "had been waiting itself",
    "transfer": "had been exchanging elsewhere",
}


def sentence(loss: Loss, report: Report) -> str:
    """The loss for a reader who knows the script, and not the tool."""
    if loss.kind == "wait" and loss.rank is None:
        return "waiting that can't be booked to one rank (see below)."
    if loss.kind == "wait":
        return (
            f"waiting for {_rank(loss, report)}, which {_DOING[str(loss.doing)]}; mostly in "
            f"{_collective(loss)}{_steps(loss, report)}."
        )
    if loss.kind == "transfer":
        ending = "" if report.clocks_aligned else " (waits among them)"
        when = f"after the last rank had arrived{ending}{_steps(loss, report)}"
        return f"{_collective(loss)} itself, {when}."
    what = {
        "input": "waiting for the next batch",
        "checkpoint": "standing still for checkpoints",
        "validation": "evaluating",
        "other": "the script's own work outside of all that was recognised",
    }[loss.kind]
    most = ""
    if len(report.ranks) > 1 and loss.most is not None:
        most = f"; most on {_rank(loss, report)}: {100 * loss.most:.1f} % of its time"
    return f"{what}{most}{_steps(loss, report)}.{_lines(loss)}"


def _rank(loss: Loss, report: Report) -> str:
    several = len(set(report.hosts)) > 1
    return f"rank {loss.rank}" + (f" ({loss.host})" if several else "")


def _collective(loss: Loss) -> str:
    group = "" if loss.group in (None, "0", "default_pg") else f" of group {loss.group}"
    return f"{loss.collective}{group}"


def _steps(loss: Loss, report: Report) -> str:
    if loss.steps is None or not report.ranges:
        return ""
    first, last = report.ranges[0].first, report.ranges[-1].last
    if loss.steps == (first, last) or loss.steps[1] - loss.steps[0] >= 0.6 * (last - first):
        return ", in all of the steps"
    return f", in steps {loss.steps[0]} to {loss.steps[1]}"


def _lines(loss: Loss) -> str:
    if not loss.lines:
        return ""
    line = loss.lines[0]
    inside = f" (in {line['inside']})" if line.get("inside") else ""
    place = f"{Path(str(line['file'])).name}:{line['line']}"
    return f" Seen there: {place}{inside}  {line['code']}"
