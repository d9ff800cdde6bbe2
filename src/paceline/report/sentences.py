"""Sentences that explain losses, standstills, stalls and outlier steps.

The sentence of a loss says what it is, on which rank, in which steps and in which collective.
"""

from pathlib import Path

import numpy as np

from ..analyze.figures.losses import Loss
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STALLED, STILL, Stall, Standstill
from ..analyze.figures.steps import Outlier
from ..analyze.figures.window_steps import Occurrence
from .numbers import counted, duration, ordinal

_LATE_BECAUSE = {
    "useful": "computed longer",
    "input": "had waited for its batch",
    "checkpoint": "had saved a checkpoint",
    "validation": "had evaluated the model",
    "starved": "had waited for a core",
    "other": "had done other work of the script",
    "bubble": "had waited for another stage of its pipeline",
    "wait": "had waited for another rank",
    "transfer": "was late after its previous collective",
    STILL: "had stood still",
}

_DID_LONGER = {
    "useful": "computed",
    "input": "waited for a batch",
    "checkpoint": "saved",
    "validation": "evaluated",
    "starved": "waited for a core",
    "other": "did other work of the script",
    "bubble": "waited for another stage of its pipeline",
    "transfer": "exchanged data",
    STILL: "stood still",
}
_STARVED_WHILE = {
    "useful": ", mostly while it computed",
    "input": ", mostly while it waited for or loaded batches",
    "checkpoint": ", mostly while it saved checkpoints",
    "validation": ", mostly while it evaluated the model",
    "other": ", mostly during other work of the script",
}
MAX_TROUBLES = 3  # standstills and stalls with a sentence each; the others are counted
MAX_NAMED_STEPS = 8
# A standstill in one of them may be due to the line of the script that ran.
_STATES_OF_SCRIPT = ("input", "checkpoint", "validation", "other")
_MIN_NEARLY_ALL = 0.9  # of the steps, or of a loss
_MIN_WAIT_S = 0.1  # a shorter wait for a rank that stood still is not mentioned


def sentence(loss: Loss, report: Report) -> str:
    """Explain a loss to a reader who knows the script but not Paceline."""
    if loss.kind == "wait" and loss.rank is None:
        return "short waits that no single rank caused."
    if loss.kind == "wait":
        late_because = _LATE_BECAUSE[doing(loss, report)]
        return (
            f"waiting for {_rank_in_words(loss, report)}, which {late_because}; mostly in "
            f"{_collective_in_words(loss)}{_steps_in_words(loss, report)}."
        )
    if loss.kind == "transfer":
        ending = "" if report.clocks_aligned else " (waits included)"
        when = f"after the last rank had arrived{ending}{_steps_in_words(loss, report)}"
        return f"{_collective_in_words(loss)} itself, {when}."
    what = {
        "input": "waiting for the next batch",
        "checkpoint": "waiting for checkpoints",
        "validation": "evaluating",
        "starved": f"waiting for a core{_STARVED_WHILE.get(str(loss.doing), '')}",
        "other": "other work of the script, outside of the recognised phases",
        "bubble": "waiting for other stages of the pipeline",
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
    assert loss.rank is not None
    return report.named([loss.rank], host=str(loss.host) if several else "")


def _collective_in_words(loss: Loss) -> str:
    group = "" if loss.group in (None, "0", "default_pg") else f" of group {loss.group}"
    return f"{loss.collective}{group}"


def _steps_in_words(loss: Loss, report: Report) -> str:
    if loss.steps is None or not report.ranges:
        return ""
    if loss.occurs is not None:
        share = loss.occurs.share
        most = f"{100 * share:.0f} % of it " if share < _MIN_NEARLY_ALL else ""
        return f", {most}{occurs_in_words(loss.occurs)}"
    first, last = loss.steps
    return f", in step {first}" if first == last else f", in steps {first} to {last}"


def occurs_in_words(one: Occurrence) -> str:
    """Say in which steps a loss occurs: "in all steps", "in every 30th step", "in step 7"."""
    if one.count == one.of:
        return "in all steps"
    if one.count == 1 and one.first > one.last_of_all:
        return "after the last step"
    if one.count >= _MIN_NEARLY_ALL * one.of:
        return f"in nearly all steps ({one.count} of {one.of})"
    named = _steps_of(one)
    if one.at_epoch_ends:
        return f"at the {'end of an epoch' if one.count == 1 else 'ends of epochs'} ({named})"
    return f"in {named}"


def _steps_of(one: Occurrence) -> str:
    """Name some of the steps: their period, their range, their numbers, or how many they are."""
    span = one.last - one.first + 1
    if one.period is not None:
        about = "" if one.exact else "about "
        return f"{about}every {ordinal(one.period)} step, from {one.first} to {one.last}"
    if one.count == 1:
        return f"step {one.first}"
    if one.count == span or (one.count > MAX_NAMED_STEPS and one.count >= _MIN_NEARLY_ALL * span):
        return f"steps {one.first} to {one.last}"
    if one.count <= MAX_NAMED_STEPS:
        *before, last = one.steps
        return f"steps {', '.join(map(str, before))} and {last}"
    between = f", from {one.first} to {one.last}" if span < _MIN_NEARLY_ALL * one.of else ""
    return f"{one.count} of {one.of} steps{between}"


def _source_line(loss: Loss) -> str:
    if not loss.lines:
        return ""
    line = loss.lines[0]
    inside = f" (in {line['inside']})" if line.get("inside") else ""
    return f" Seen at {place(line)}{inside}  {line['code']}"


def place(line: dict[str, object]) -> str:
    """Return the file name and number of a line of the script: "train.py:12"."""
    return f"{Path(str(line['file'])).name}:{line['line']}"


def troubles(report: Report) -> list[str]:
    """Explain each standstill and stall, the longest first; count those beyond MAX_TROUBLES."""
    troubles: list[Standstill | Stall] = [*report.stood_still, *report.stalled]
    troubles.sort(key=lambda one: -one.seconds)
    lines = [
        _standstill_sentence(one, report) if isinstance(one, Standstill) else _stall_sentence(one)
        for one in troubles[:MAX_TROUBLES]
    ]
    more = troubles[MAX_TROUBLES:]
    if more:
        kinds = [
            counted(count, f"more {what}")
            for count, what in (
                (sum(isinstance(one, Standstill) for one in more), "standstill"),
                (sum(isinstance(one, Stall) for one in more), "stall"),
            )
            if count
        ]
        longest = duration(more[0].seconds)
        lines.append(f"And {' and '.join(kinds)}, the longest of {longest} (--json)")
    return lines


def _standstill_sentence(one: Standstill, report: Report) -> str:
    several = len(set(report.hosts)) > 1
    ranks = report.named(one.ranks)
    who = report.named(one.ranks, host=one.host if several else "")
    who = who[0].upper() + who[1:]
    evidence = f"none of {'its' if len(one.ranks) == 1 else 'their'} threads ran"
    as_when = "a process is stopped or swapped out"
    if one.whole:
        who, evidence = one.host, f"no thread of its ranks ran ({ranks})"
        as_when = "a node or a whole job is paused"
    if one.line is not None and one.state in _STATES_OF_SCRIPT:
        called = f"{place(one.line)} ({one.line['code']})"
        as_when = f"{called} calls C code that holds the interpreter lock (GIL), or {as_when}"
    waited = ""
    if one.waited_s is not None and one.waited_s >= _MIN_WAIT_S:
        whom = "it" if one.whole or len(one.ranks) == 1 else "them"
        waited = f"; others waited {duration(one.waited_s)} for {whom}"
    standstill = f"stood still for {duration(one.seconds)} in step {one.step}"
    return f"{who} {standstill}: {evidence}, as when {as_when}{waited}"


def _stall_sentence(one: Stall) -> str:
    group = "" if one.group in ("0", "default_pg") else f" of group {one.group}"
    number = "" if one.number is None else f" {one.number}"
    took = f"{one.collective[0].upper()}{one.collective[1:]}{number}{group} took"
    although = f"although all its ranks had arrived (usual: {duration(one.usual_s)})"
    culprit = "network" if one.hosts > 1 else "collective itself"
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
    return [_outliers_sentence(ones, report) for ones in order]


def _outliers_sentence(ones: list[Outlier], report: Report) -> str:
    steps = [one.step for one in ones]
    longer = duration(float(np.median([one.longer_s for one in ones])))
    about = "about " if len(ones) > 1 else ""
    return f"{_steps_named(steps)}: {cause(ones[0], report)}, {about}{longer} longer than usual"


def cause(one: Outlier, report: Report) -> str:
    """Say which rank did what longer than usual in an outlier step."""
    if one.state is None:
        return "no rank and no state explains it alone"
    if one.state == STALLED:
        return "a collective stalled"
    who = "the ranks" if one.rank is None else report.named([one.rank])
    return f"{who} {_DID_LONGER.get(one.state, one.state)}"


def _steps_named(steps: list[int]) -> str:
    """Name the steps, with their period if they are periodic."""
    if len(steps) == 1:
        return f"Step {steps[0]}"
    gaps = np.unique(np.diff(steps))
    if len(steps) > 3 and len(gaps) == 1 and gaps[0] > 1:
        period = ordinal(int(gaps[0]))
        return f"{len(steps)} steps, every {period} from {steps[0]} to {steps[-1]}"
    named, more = ", ".join(map(str, steps[:MAX_NAMED_STEPS])), len(steps) - MAX_NAMED_STEPS
    return f"Steps {named}" + (f" and {more} more" if more > 0 else "")
