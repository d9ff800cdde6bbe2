"""Sentences that explain losses, standstills, stalls and outlier steps.

The sentence of a loss says what it is, on which rank, in which steps and in which collective.
"""

from pathlib import Path

import numpy as np

from ..analyze.figures.losses import Loss
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STALLED, STILL, Stall, Standstill
from ..analyze.figures.steps import Outlier
from .numbers import duration

_LATE_BECAUSE = {
    "useful": "computed longer",
    "input": "had waited for its batch",
    "checkpoint": "had been saving",
    "validation": "had been evaluating",
    "other": "had been in the script's own work",
    "wait": "had been waiting itself",
    "transfer": "had been exchanging elsewhere",
    STILL: "had stood still",
}

_DID_LONGER = {
    "useful": "computed",
    "input": "waited for a batch",
    "checkpoint": "saved",
    "validation": "evaluated",
    "other": "did the script's own work",
    "transfer": "exchanged data",
    STILL: "stood still",
}
MAX_TROUBLES = 3  # standstills and stalls with a sentence each; the others are counted
_MIN_WAIT_S = 0.1  # a shorter wait for a rank that stood still is not mentioned


def sentence(loss: Loss, report: Report) -> str:
    """Explain a loss to a reader who knows the script but not Paceline."""
    if loss.kind == "wait" and loss.rank is None:
        return "waiting that can't be booked to one rank (see below)."
    if loss.kind == "wait":
        late_because = _LATE_BECAUSE[doing(loss, report)]
        return (
            f"waiting for {_rank_in_words(loss, report)}, which {late_because}; mostly in "
            f"{_collective_in_words(loss)}{_steps_in_words(loss, report)}."
        )
    if loss.kind == "transfer":
        ending = "" if report.clocks_aligned else " (waits among them)"
        when = f"after the last rank had arrived{ending}{_steps_in_words(loss, report)}"
        return f"{_collective_in_words(loss)} itself, {when}."
    what = {
        "input": "waiting for the next batch",
        "checkpoint": "standing still for checkpoints",
        "validation": "evaluating",
        "other": "the script's own work outside of all that was recognised",
    }[loss.kind]
    most = ""
    if len(report.ranks) > 1 and loss.most is not None:
        most = f"; most on {_rank_in_words(loss, report)}: {100 * loss.most:.1f} % of its time"
    return f"{what}{most}{_steps_in_words(loss, report)}.{_source_line(loss)}"


def doing(loss: Loss, report: Report) -> str:
    """Return the state in which the late rank of a wait spent more time than the others.

    It is STILL if standstills of that rank explain at least half of the wait.
    """
    standstills = [one for one in report.stood_still if loss.rank in one.ranks and one.waited_s]
    waited_s = sum(one.waited_s or 0.0 for one in standstills)
    other_ranks = len(report.ranks) - max((len(one.ranks) for one in standstills), default=0)
    whole_wait_s = loss.share * (report.window_s or 0.0) * len(report.ranks)
    return (
        STILL if standstills and waited_s * other_ranks >= 0.5 * whole_wait_s else str(loss.doing)
    )


def _rank_in_words(loss: Loss, report: Report) -> str:
    several = len(set(report.hosts)) > 1
    return f"rank {loss.rank}" + (f" ({loss.host})" if several else "")


def _collective_in_words(loss: Loss) -> str:
    group = "" if loss.group in (None, "0", "default_pg") else f" of group {loss.group}"
    return f"{loss.collective}{group}"


def _steps_in_words(loss: Loss, report: Report) -> str:
    if loss.steps is None or not report.ranges:
        return ""
    first, last = report.ranges[0].first, report.ranges[-1].last
    if loss.steps == (first, last) or loss.steps[1] - loss.steps[0] >= 0.6 * (last - first):
        return ", in all of the steps"
    return f", in steps {loss.steps[0]} to {loss.steps[1]}"


def _source_line(loss: Loss) -> str:
    if not loss.lines:
        return ""
    line = loss.lines[0]
    inside = f" (in {line['inside']})" if line.get("inside") else ""
    place = f"{Path(str(line['file'])).name}:{line['line']}"
    return f" Seen there: {place}{inside}  {line['code']}"


def troubles(report: Report) -> list[str]:
    """Explain each standstill and stall, the longest first; count those beyond MAX_TROUBLES."""
    several = len(set(report.hosts)) > 1
    troubles: list[Standstill | Stall] = [*report.stood_still, *report.stalled]
    troubles.sort(key=lambda one: -one.seconds)
    lines = [
        _standstill_sentence(one, several) if isinstance(one, Standstill) else _stall_sentence(one)
        for one in troubles[:MAX_TROUBLES]
    ]
    more = troubles[MAX_TROUBLES:]
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
        lines.append(f"And {' and '.join(kinds)}, the longest of {longest} (--json)")
    return lines


def _standstill_sentence(one: Standstill, several: bool) -> str:
    ranks = ", ".join(map(str, one.ranks[:8])) + (" ..." if len(one.ranks) > 8 else "")
    who = f"Rank{'s' if len(one.ranks) > 1 else ''} {ranks}"
    who += f" ({one.host})" if several else ""
    evidence = f"none of {'its' if len(one.ranks) == 1 else 'their'} threads ran"
    as_when = "as when a process is stopped or swapped out"
    if one.whole:
        who, evidence = one.host, f"nothing of its ranks ran ({ranks})"
        as_when = "as when a host is paused, or all of a job"
    waited = ""
    if one.waited_s is not None and one.waited_s >= _MIN_WAIT_S:
        whom = "it" if one.whole or len(one.ranks) == 1 else "them"
        waited = f"; others waited {duration(one.waited_s)} for {whom}"
    standstill = f"stood still for {duration(one.seconds)} in step {one.step}"
    return f"{who} {standstill}: {evidence}, {as_when}{waited}"


def _stall_sentence(one: Stall) -> str:
    group = "" if one.group in ("0", "default_pg") else f" of group {one.group}"
    number = "" if one.number is None else f" {one.number}"
    took = f"{one.collective[0].upper()}{one.collective[1:]}{number}{group} took"
    although = f"though all its ranks were there (usual: {duration(one.usual_s)})"
    culprit = "network" if one.hosts > 1 else "exchange itself"
    return f"{took} {duration(one.seconds)} in step {one.step} {although}: the {culprit} stalled"


def outliers(report: Report) -> list[str]:
    """Explain outlier steps, one sentence for each cause, the most costly cause first.

    Standstills and stalls are left out, because ``troubles`` explains them.
    """
    found = report.step_times
    if found is None:
        return []
    causes: dict[tuple[str | None, int | None], list[Outlier]] = {}
    for one in found.outliers:
        if one.state in (STILL, STALLED):
            continue
        causes.setdefault((one.state, one.rank), []).append(one)
    order = sorted(causes.values(), key=lambda ones: -sum(o.longer_s for o in ones))
    return [_outliers_sentence(ones) for ones in order]


def _outliers_sentence(ones: list[Outlier]) -> str:
    steps = [one.step for one in ones]
    longer = duration(float(np.median([one.longer_s for one in ones])))
    about = "about " if len(ones) > 1 else ""
    return f"{_steps_named(steps)}: {cause(ones[0])}, {about}{longer} longer than usual"


def cause(one: Outlier) -> str:
    """Say which rank did what longer than usual in an outlier step."""
    if one.state is None:
        return "no rank and no state explains it alone"
    if one.state == STALLED:
        return "an exchange stalled"
    who = "the ranks" if one.rank is None else f"rank {one.rank}"
    return f"{who} {_DID_LONGER.get(one.state, one.state)}"


def _steps_named(steps: list[int]) -> str:
    """Name the steps, with their period if they are periodic."""
    if len(steps) == 1:
        return f"Step {steps[0]}"
    gaps = np.unique(np.diff(steps))
    if len(steps) > 3 and len(gaps) == 1 and gaps[0] > 1:
        return f"{len(steps)} steps, every {gaps[0]}th from {steps[0]} to {steps[-1]}"
    named = ", ".join(map(str, steps[:8]))
    return f"Steps {named}" + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")
