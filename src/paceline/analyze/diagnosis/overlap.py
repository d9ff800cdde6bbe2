"""Give each second of a step to one cause only.

Two rules may see the same time: a rank that collects garbage is also late, and the line that
collects is also work of the script. Such a pair is one cause with two signs. The more specific
cause keeps the time. Shares of all causes add up to 1 at most.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .confirmation import (
    CONFIRMED,
    ESTIMATE,
    EXCHANGE_PARTS,
    EXPERIMENT,
    KEPT_MEMORY,
    measured,
)
from .evidence import MIN_SHARE, Evidence
from .ladder import BARS, Interval
from .rules import compute

ROUNDING = 1e-9  # error of a sum of shares


@dataclass(frozen=True)
class Cause:
    """One cause of lost time.

    Attributes:
        share: Share of a step's time, without what belongs to other causes.
        interval: Range of shares that the ladder and the record allow.
        confirmed: Whether an experiment confirms the cause: "confirmed", "not-confirmed" or
            "not-testable".
        measured: Share that the experiment measured, with its interval; None without one.
        basis: What the share is based on: "experiment", "record" or "estimate".
        witness: Name of the witness whose rule named the cause.
    """

    id: str
    share: float
    interval: tuple[float, float]
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    confirmed: str = CONFIRMED
    measured: Interval | None = None
    basis: str = EXPERIMENT
    witness: str = ""

    def reduced(self, share: float) -> "Cause":
        """Return the cause without a share that belongs to another one."""
        low, high = (max(bound - share, 0.0) for bound in self.interval)
        return replace(self, share=max(self.share - share, 0.0), interval=(low, high))


def _collected_between_phases(e: Evidence) -> float:
    """Return the share of work between the phases of a step in lines that collect garbage."""
    at = {
        (one["collecting"]["file"].rpartition("/")[2], one["collecting"].get("line"))
        for climbed in e.rungs.get("everything", [])
        for one in climbed.used
        if "file" in one.get("collecting", {})
    }
    found = sum(
        loss.share * float(str(line.get("share", 0.0)))
        for loss in e.losses_of_kind("other", doing=("other",))
        for line in loss.lines
        if (str(line.get("file", "")).rpartition("/")[2], line.get("line")) in at
    )
    return min(found, compute.collecting_share(e))


def _collected_unevenly(e: Evidence) -> float:
    """Return how much longer one rank collects garbage than another, as a share of a step."""
    each: dict[int, list[float]] = {}
    for climbed in e.rungs.get("everything", []):
        for rank, one in enumerate(climbed.used):
            if one.get("seconds"):
                seconds = one.get("collecting", {}).get("seconds", 0.0)
                each.setdefault(rank, []).append(seconds / one["seconds"])
    means = [sum(shares) / len(shares) for shares in each.values()]
    return max(means) - min(means) if means else 0.0


def _faults_of(rung: str, without: str) -> Callable[[Evidence], float]:
    """Return a function for the part of page faults that one rung has and another has not.

    The part of the faults is taken as a part of what keeping memory saves.
    """

    def overlap(e: Evidence) -> float:
        steps = {name: e.relative_step_time(name) for name in (rung, without, "everything")}
        faults = {name: e.mean_usage(name, "faults") * steps[name] for name in steps}
        if not faults["everything"] or not steps[without]:
            return 0.0
        part = (faults[rung] - faults[without]) / faults["everything"]
        found = e.step_time_saving(KEPT_MEMORY, "everything")
        return max(part, 0.0) * max(found.mean, 0.0) if found is not None else 0.0

    return overlap


def _map_of_used_parameters(e: Evidence) -> float:
    bar = e.waterfall.of_step("exchange")
    return compute.used_map_share(e) * max(bar.mean, 0.0) if bar is not None else 0.0


def _fewer_threads(e: Evidence) -> float:
    found = e.step_time_saving("one thread", "silent")
    return max(found.mean, 0.0) if found is not None else 0.0


def _without_broadcasts(e: Evidence) -> float:
    found = measured(e, "broadcasts")
    return max(found.mean, 0.0) if found is not None else 0.0


def _waits_for_other_programs(e: Evidence) -> float:
    """Return what waits for cores that other programs use take, beyond those of one rank alone."""
    alone = e.mean_usage("alone", "delayed") * e.relative_step_time("alone")
    return max(e.foreign_wait_share - alone, 0.0)


# (specific witness, general witness): the share of a step that both of them see.
SIGNS: dict[tuple[str, str], Callable[[Evidence], float]] = {
    ("collector", "script"): _collected_between_phases,
    ("collector", "uneven"): _collected_unevenly,
    ("allocator", "exchange"): _faults_of("cached", "silent"),
    ("allocator", "input"): _faults_of("everything", "cached"),
    ("search", "exchange"): _map_of_used_parameters,
    ("broadcasts", "exchange"): _without_broadcasts,
    ("threads", "sharing"): _fewer_threads,
    ("noise", "sharing"): _waits_for_other_programs,
}


def without_overlap(causes: list[Cause], e: Evidence) -> list[Cause]:
    """Return the causes with disjoint shares, largest first; estimates come last.

    A cause that loses so much that less than ``MIN_SHARE`` remains is no cause of its own any
    more. It is listed as a sign in the evidence of the cause that keeps the time.
    """
    left = {cause.witness: cause for cause in causes}
    for (specific, general), overlap in SIGNS.items():
        if specific in left and general in left:
            shared = max(min(overlap(e), left[specific].share, left[general].share), 0.0)
            _take(left, specific, general, shared)
    whole = 1.0
    found: list[Cause] = []
    for cause in sorted(left.values(), key=_reliability):
        kept = cause.reduced(cause.share - whole) if cause.share > whole else cause
        if kept.share >= MIN_SHARE:
            found.append(kept)
            whole -= kept.share
        elif found:  # its time belongs to the causes before it
            at = found.index(max(found, key=lambda one: one.share))
            found[at] = _with_sign(found[at], cause)
    return ranked(found)


def check_no_time_is_named_twice(found: list[Cause], e: Evidence) -> None:
    """Assert that shares add up to a step at most, and those of bars to what the bars lose."""
    assert all(0 < one.share <= 1 + ROUNDING for one in found), found
    assert sum(one.share for one in found) <= 1 + ROUNDING, found
    lost = sum(max(bar.of_step.mean, 0.0) for bar in e.waterfall.bars)
    of_bars = [one for one in found if one.basis == EXPERIMENT]
    of_bars = [one for one in of_bars if one.witness in (*BARS, *EXCHANGE_PARTS)]
    assert sum(one.share for one in of_bars) <= lost + ROUNDING, (found, lost)


def ranked(causes: list[Cause]) -> list[Cause]:
    """Return the causes, largest first; estimates come last."""
    return sorted(causes, key=lambda one: (one.basis == ESTIMATE, -one.share))


def _take(left: dict[str, Cause], specific: str, general: str, shared: float) -> None:
    """Take the time that both witnesses see from the general one."""
    rest = left[general].reduced(shared)
    if rest.share >= MIN_SHARE:
        left[general] = rest
        return
    if shared:
        left[specific] = _with_sign(left[specific], left[general])
        del left[general]


def _with_sign(cause: Cause, sign: Cause) -> Cause:
    signs = [*cause.evidence.get("signs", []), {"id": sign.id, "share": sign.share}]
    return replace(cause, evidence=cause.evidence | {"signs": signs})


def _reliability(cause: Cause) -> tuple[int, float]:
    """Return the sort key of who keeps time that several causes see."""
    if cause.basis == EXPERIMENT:
        rank = 1 if cause.witness in BARS else 0
    else:
        rank = 3 if cause.basis == ESTIMATE else 2
    return rank, -cause.share
