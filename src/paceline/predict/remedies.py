"""Select the knobs that address each cause, each with its predicted gain."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.diagnosis import Remedy
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.rules.script import off_core_share
from ..analyze.diagnosis.rungs import Interval
from ..analyze.diagnosis.table import CAUSES
from ..knobs.registry import COMPUTING, KNOBS, Knob
from ..security.files import read_regular
from .gains import predict_saving

MAX_SOURCE_BYTES = 4 << 20  # of a script
MIN_SAVING = 0.01  # share of a step: smaller savings are not proposed
MAX_SAVING = 0.95  # share of a step: larger savings are not credible and are clipped
MIN_UNCERTAINTY = 0.2  # minimum relative uncertainty of a gain: error of narrower predictions
MIN_COMPUTING_SHARE = (
    0.5  # minimum share of computing in a step for which faster computing is proposed
)
MAX_CAUSE_SHARE = 0.2  # a larger cause comes before faster computing
MAX_OF_CAUSE = 4  # remedies of one cause, of those that Paceline can set and of the edits each


def read_script(script: str | Path) -> str:
    """Return the source of a training script; "" if it is a module's name or cannot be read."""
    try:
        return read_regular(script, MAX_SOURCE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def remedies(
    e: Evidence, causes: Sequence[Cause], script: str, known: Mapping[str, Any]
) -> list[Remedy]:
    """Return the remedies, those that Paceline can set first, then by gain over effort.

    Args:
        script: Source code of the training script.
        known: Values of the knobs that are already set.
    """
    found = [
        remedy
        for cause in (*causes, *_computing(e, causes))
        for name, knob in KNOBS.items()
        if cause.id in knob.answers and (remedy := _remedy(name, knob, e, cause, script))
        if known.get(name) != remedy.value
    ]
    best: dict[str, Remedy] = {}
    for remedy in found:  # one knob may address several causes
        other = best.get(remedy.knob)
        if other is None or _sort_key(remedy) > _sort_key(other):
            best[remedy.knob] = remedy
    ranked = sorted(best.values(), key=lambda one: (not one.settable, -_sort_key(one)))
    counts: Counter[tuple[str, bool]] = Counter()
    shown = []
    for remedy in ranked:
        kind = (remedy.cause, remedy.settable)
        counts[kind] += 1
        if counts[kind] <= MAX_OF_CAUSE:
            shown.append(remedy)
    return shown


def _computing(e: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return computing as a pseudo-cause, if it is most of a step and no cause is large.

    Time in which a rank computes nothing is left out: that in which it uses no core, and that of
    the causes that lie within the useful time.
    """
    within = sum(cause.share for cause in causes if CAUSES[cause.id].is_in_useful)
    share = e.useful_share - off_core_share(e) - within
    largest = max((cause.share for cause in causes), default=0.0)
    if share < MIN_COMPUTING_SHARE or largest >= MAX_CAUSE_SHARE:
        return []
    return [Cause(COMPUTING, share, (share, share), "", {})]


def _sort_key(remedy: Remedy) -> float:
    """Return the mean gain over the effort; remedies that must be measured come last."""
    effort = KNOBS[remedy.knob].effort + remedy.numbers
    return remedy.gain.mean / effort if remedy.gain is not None else 0.0


def gain_of(saves: Interval) -> Interval:
    """Convert a saved share s of the step time to a gain of the throughput: s / (1 - s)."""
    mean, low, high = (min(one, MAX_SAVING) for one in (saves.mean, saves.low, saves.high))
    return Interval(mean / (1 - mean), low / (1 - low), high / (1 - high))


def _widen(gain: Interval) -> Interval:
    """Widen an interval to MIN_UNCERTAINTY: conclusions are less certain than measurements."""
    least = MIN_UNCERTAINTY * abs(gain.mean)
    low, high = min(gain.low, gain.mean - least), max(gain.high, gain.mean + least)
    return Interval(gain.mean, low, high)


def gain_after(gain: Interval, faster: float) -> Interval:
    """Return the gain for a step that is already ``faster`` times as fast.

    The remedy still saves the same number of seconds.
    """
    if faster == 1:
        return gain
    # Saved shares of the original step.
    each = (one / (1 + one) for one in (gain.mean, gain.low, gain.high))
    mean, low, high = (min(one * faster, MAX_SAVING) for one in each)
    return gain_of(Interval(mean, low, high))


def _remedy(name: str, knob: Knob, e: Evidence, cause: Cause, script: str) -> Remedy | None:
    saving = predict_saving(name, e, cause)
    if saving is None or (saving.saves is not None and saving.saves.mean < MIN_SAVING):
        return None
    gain = _widen(gain_of(saving.saves)) if saving.saves is not None else None
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
    """Find the line to edit: one that the record contains, else the only one that matches."""
    seen = cause.evidence.get("lines") or []
    if seen and not knob.hook and not knob.is_edited_elsewhere:
        return int(seen[0]["line"]), str(seen[0]["code"])
    if not knob.looks_for:
        return None, ""
    lines = enumerate(script.splitlines(), 1)
    fits = [(at, line.strip()) for at, line in lines if re.search(knob.looks_for, line)]
    fits = [fit for fit in fits if not fit[1].startswith(("#", "import ", "from "))]
    return fits[0] if len(fits) == 1 or (fits and knob.hook) else (None, "")
