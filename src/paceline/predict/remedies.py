"""For every cause the knobs that answer it, each with what it would gain."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.ladder import Interval
from ..knobs.registry import COMPUTING, KNOBS, Knob
from .gains import GAINS

LEAST = 0.01  # of a step: what saves less is not proposed
MOST = 0.95  # of a step: more than that is not believed
DOUBT = 0.2  # of a gain, either way: what predictions were off by that looked surer than that
HALF = 0.5  # of a step that ranks compute: then computing itself is worth to be made faster


@dataclass(frozen=True)
class Remedy:
    """gain: of the throughput, predicted; None where only a few steps with it can tell. source:
    where the prediction is from. settable: from outside; else the script is to be edited, as
    ``edit`` says, in ``line``, which reads ``code``, where that could be found. numbers: results
    change by more than the order of sums. costs: what else it may cost."""

    knob: str
    cause: str
    value: Any
    gain: Interval | None
    source: str
    settable: bool
    edit: str
    line: int | None = None
    code: str = ""
    numbers: bool = False
    costs: str = ""


def remedies(
    e: Evidence, causes: Sequence[Cause], script: str, known: Mapping[str, Any]
) -> list[Remedy]:
    """What can be set first, the largest gain first. script: its source. known: what is set."""
    found = [
        remedy
        for cause in (*causes, *_computing(e))
        for name, knob in KNOBS.items()
        if cause.id in knob.answers and (remedy := _remedy(name, knob, e, cause, script))
        if known.get(name) != remedy.value
    ]
    best: dict[str, Remedy] = {}
    for remedy in found:  # one knob may answer several causes
        other = best.get(remedy.knob)
        if other is None or _most(remedy) > _most(other):
            best[remedy.knob] = remedy
    return sorted(best.values(), key=lambda one: (not one.settable, -_most(one)))


def _computing(e: Evidence) -> list[Cause]:
    """What ranks compute, where that is most of a step; no cause, and last in line."""
    own = [rank["useful"] for rank in e.report.states]
    share = sum(own) / len(own) if own else 0.0
    return [Cause(COMPUTING, share, (share, share), "", {})] if share >= HALF else []


def _most(remedy: Remedy) -> float:
    """By what it comes before others: what must be tried to be known comes last."""
    return remedy.gain.mean if remedy.gain is not None else 0.0


def gain_of(saves: Interval) -> Interval:
    """Of the throughput, from what is saved of a step's time: s / (1 - s)."""
    mean, low, high = (min(one, MOST) for one in (saves.mean, saves.low, saves.high))
    return Interval(mean / (1 - mean), low / (1 - low), high / (1 - high))


def _doubted(gain: Interval) -> Interval:
    """At least DOUBT wide: what was measured is sure, what is concluded from it less so."""
    least = DOUBT * abs(gain.mean)
    low, high = min(gain.low, gain.mean - least), max(gain.high, gain.mean + least)
    return Interval(gain.mean, low, high)


def after(gain: Interval, faster: float) -> Interval:
    """The same seconds less of a step that is ``faster`` times as fast by now."""
    if faster == 1:
        return gain
    each = (one / (1 + one) for one in (gain.mean, gain.low, gain.high))  # of the step before
    mean, low, high = (min(one * faster, MOST) for one in each)
    return gain_of(Interval(mean, low, high))


def _remedy(name: str, knob: Knob, e: Evidence, cause: Cause, script: str) -> Remedy | None:
    saving = GAINS[name](e, cause)
    if saving is None or (saving.saves is not None and saving.saves.mean < LEAST):
        return None
    gain = _doubted(gain_of(saving.saves)) if saving.saves is not None else None
    line, code = _line(knob, cause, script)
    edit = knob.edit.format(value=saving.value)
    return Remedy(
        name,
        cause.id,
        saving.value,
        gain,
        saving.source,
        bool(knob.hook),
        edit,
        line,
        code,
        knob.numbers,
        knob.costs,
    )


def _line(knob: Knob, cause: Cause, script: str) -> tuple[int | None, str]:
    """Where the edit belongs: a line that the record saw, else the only one that fits."""
    seen = cause.evidence.get("lines") or []
    if seen and not knob.hook:
        return int(seen[0]["line"]), str(seen[0]["code"])
    if not knob.looks_for:
        return None, ""
    lines = enumerate(script.splitlines(), 1)
    fits = [(at, line.strip()) for at, line in lines if re.search(knob.looks_for, line)]
    fits = [one for one in fits if not one[1].startswith(("#", "import ", "from "))]
    return fits[0] if len(fits) == 1 or (fits and knob.hook) else (None, "")
