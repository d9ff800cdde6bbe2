"""A loss in a sentence: what it is, whose, where, in which steps and in which collective. Brief
trouble that the run survived, and the steps that stand out for another reason."""

from pathlib import Path

import numpy as np

from ..analyze.figures.losses import Loss
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STALLED, STILL, Stall, Standstill
from ..analyze.figures.steps import Outlier
from .numbers import duration

_DOING = {
    "useful": "computed longer",
    "input": "had waited for its batch",
    "checkpoint": "had been saving",
    "validation": "had been evaluating",
    "other": "had been in the script's own work",
    "wait": "had been waiting itself",
    "transfer": "had been exchanging elsewhere",
    STILL: "had stood still",
}

_DID = {
    "useful": "computed",
    "input": "waited for a batch",
    "checkpoint": "saved",
    "validation": "evaluated",
    "other": "did the script's own work",
    "transfer": "exchanged data",
    STILL: "stood still",
}
TROUBLES = 3  # that are told one by one
_SHORT = 0.1  # s: a wait that is not worth a word beside a standstill


def sentence(loss: Loss, report: Report) -> str:
    """The loss for a reader who knows the script, and not the tool."""
    if loss.kind == "wait" and loss.rank is None:
        return "waiting that can't be booked to one rank (see below)."
    if loss.kind == "wait":
        return (
            f"waiting for {_rank(loss, report)}, which {_DOING[doing(loss, report)]}; mostly in "
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


def doing(loss: Loss, report: Report) -> str:
    """What the late rank of a wait did longer: it stood still, if half of the wait was for that."""
    alike = [one for one in report.stood_still if loss.rank in one.ranks and one.waited_s]
    waited = sum(one.waited_s or 0.0 for one in alike)
    others = len(report.ranks) - max((len(one.ranks) for one in alike), default=0)
    whole = loss.share * (report.window_s or 0.0) * len(report.ranks)
    return STILL if alike and waited * others >= 0.5 * whole else str(loss.doing)


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


def troubles(report: Report) -> list[str]:
    """Each standstill and stall in a sentence, the longest first; of many the rest is counted."""
    several = len(set(report.hosts)) > 1
    every: list[Standstill | Stall] = [*report.stood_still, *report.stalled]
    every.sort(key=lambda one: -one.seconds)
    told = [
        _still(one, several) if isinstance(one, Standstill) else _stall(one)
        for one in every[:TROUBLES]
    ]
    more = every[TROUBLES:]
    if more:
        kinds = [
            f"{count} more {what}{'s' if count > 1 else ''}"
            for count, what in (
                (sum(isinstance(one, Standstill) for one in more), "standstill"),
                (sum(isinstance(one, Stall) for one in more), "stall"),
            )
            if count
        ]
        longest = duration(more[0].seconds)
        told.append(f"And {' and '.join(kinds)}, the longest of {longest} (--json)")
    return told


def _still(one: Standstill, several: bool) -> str:
    ranks = ", ".join(map(str, one.ranks[:8])) + (" ..." if len(one.ranks) > 8 else "")
    who = f"Rank{'s' if len(one.ranks) > 1 else ''} {ranks}"
    who += f" ({one.host})" if several else ""
    nothing = f"none of {'its' if len(one.ranks) == 1 else 'their'} threads ran"
    as_when = "as when a process is stopped or swapped out"
    if one.whole:
        who, nothing = one.host, f"nothing of its ranks ran ({ranks})"
        as_when = "as when a host is paused, or all of a job"
    waited = ""
    if one.waited_s is not None and one.waited_s >= _SHORT:
        whom = "it" if one.whole or len(one.ranks) == 1 else "them"
        waited = f"; others waited {duration(one.waited_s)} for {whom}"
    still = f"stood still for {duration(one.seconds)} in step {one.step}"
    return f"{who} {still}: {nothing}, {as_when}{waited}"


def _stall(one: Stall) -> str:
    group = "" if one.group in ("0", "default_pg") else f" of group {one.group}"
    number = "" if one.number is None else f" {one.number}"
    took = f"{one.collective[0].upper()}{one.collective[1:]}{number}{group} took"
    there = f"though all its ranks were there (usual: {duration(one.usual_s)})"
    what = "network" if one.hosts > 1 else "exchange itself"
    return f"{took} {duration(one.seconds)} in step {one.step} {there}: the {what} stalled"


def outliers(report: Report) -> list[str]:
    """Those of one cause in a sentence, the most costly cause first; without those that are told
    by ``troubles``."""
    found = report.step_times
    if found is None:
        return []
    causes: dict[tuple[str | None, int | None], list[Outlier]] = {}
    for one in found.outliers:
        if one.state in (STILL, STALLED):
            continue
        causes.setdefault((one.state, one.rank), []).append(one)
    order = sorted(causes.values(), key=lambda ones: -sum(o.longer_s for o in ones))
    return [_alike(ones) for ones in order]


def _alike(ones: list[Outlier]) -> str:
    steps = [one.step for one in ones]
    longer = duration(float(np.median([one.longer_s for one in ones])))
    about = "about " if len(ones) > 1 else ""
    return f"{_which(steps)}: {cause(ones[0])}, {about}{longer} longer than usual"


def cause(one: Outlier) -> str:
    """Who did what longer in an outlier."""
    if one.state is None:
        return "no rank and no state explains it alone"
    if one.state == STALLED:
        return "an exchange stalled"
    who = "the ranks" if one.rank is None else f"rank {one.rank}"
    return f"{who} {_DID.get(one.state, one.state)}"


def _which(steps: list[int]) -> str:
    """Numbers of steps, with their rhythm where they have one."""
    if len(steps) == 1:
        return f"Step {steps[0]}"
    gaps = np.unique(np.diff(steps))
    if len(steps) > 3 and len(gaps) == 1 and gaps[0] > 1:
        return f"{len(steps)} steps, every {gaps[0]}th from {steps[0]} to {steps[-1]}"
    named = ", ".join(map(str, steps[:8]))
    return f"Steps {named}" + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
