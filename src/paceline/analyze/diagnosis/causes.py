"""Find what slows a training down, by rules over the figures of the ladder and the record.

``table.py`` lists the indicators of causes, each with the rule that names its cause.
``confirmation`` decides whether the experiments confirm it. Each second of a step belongs to one
cause only.

Two rules may see the same time: a rank that collects garbage is also late, and the line that
collects is also work of the script. Such a pair is one cause with two signs. The more specific
cause keeps the time. Shares of all causes add up to 1 at most.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .confirmation import (
    CONFIRMED,
    ESTIMATE,
    EXCHANGE_PARTS,
    EXPERIMENT,
    NOT_CONFIRMED,
    NOT_TESTABLE,
    RECORD,
    Witness,
    verdict,
)
from .evidence import MIN_SHARE, Evidence
from .rules import lines, ranks
from .rules.compute import place_of
from .rules.failed_parts import FailedParts, NoFailedParts
from .rules.operators import Finding
from .rungs import BARS, Interval, Waterfall
from .table import CAUSES, INDICATORS

OPERATORS = "operators"  # witness of causes from the profile of operators
# Losses that any data-parallel training has. A core alone has a higher clock, and more of the
# caches, than when all cores compute; gradients are exchanged in each step, and ranks wait for
# whichever is late. POP calls efficiencies of 80 % acceptable (https://pop-coe.eu/node/69).
USUAL_SHARE = 0.2  # of a step; below it, they are no causes
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


def witnesses(e: Evidence) -> list[Witness]:
    """Return the shares of a step's time, from experiments and from the record.

    Those of BARS come first. The others are part of the ideal step, as one rank alone has them too.
    """
    return [
        Witness(indicator.name, indicator.saving(e), indicator.record(e))
        for indicator in INDICATORS.values()
        if indicator.is_present(e)
    ]


def causes(e: Evidence, parts: FailedParts | None = None) -> list[Cause]:
    """Return the causes above ``MIN_SHARE``, largest first; empty if nothing holds the training
    back.

    Causes that are confirmed, or that the record shows, come before those that are estimated.

    Args:
        e: What is known about the runs.
        parts: Takes note of rules that fail; None: their exception is raised.
    """
    parts = parts or NoFailedParts()
    found: dict[str, Cause] = {}
    for witness in parts.compute("the causes", lambda: witnesses(e), []):
        if verdict(witness) not in (CONFIRMED, NOT_TESTABLE):
            continue
        if (cause := _named_or_note(witness, e, parts)) is None:
            continue
        if cause.id == ranks.NOISY:
            cause = _within_waits_for_cores(cause, e)
        if cause.share >= MIN_SHARE:
            before = found.get(cause.id)
            found[cause.id] = cause if before is None else _merge(before, cause)
    late = None
    if not any(CAUSES[name].is_of_one_rank for name in found):
        late = parts.compute("the rank that the others wait for", lambda: lines.late_rank(e), None)
    work = late.named[2] if late is not None else None
    work = found["slow-rank"].evidence if "slow-rank" in found else work
    for name in ("script", "synchronisation"):
        if work is not None and name in found and _have_same_line(work, found[name].evidence):
            del found[name]  # it is the work of one rank
    of_late = [late] if late is not None else []
    by_line = parts.compute("lines of the script", lambda: _of_lines(e, found, of_late), [])
    every = [*found.values(), *by_line]
    result = parts.compute("overlap of causes", lambda: without_overlap(every, e), ranked(every))
    parts.compute("sum of causes", lambda: check_no_time_is_named_twice(result, e), None)
    return result


def _named_or_note(witness: Witness, e: Evidence, parts: FailedParts) -> Cause | None:
    return parts.compute(f"cause {witness.name!r}", lambda: _named(witness, e), None)


def _have_same_line(*evidence: dict[str, Any]) -> bool:
    """Return whether the first lines of two causes are of one function."""
    both = [figures.get("lines") for figures in evidence]
    functions = [(found[0].get("file"), found[0].get("function")) for found in both if found]
    return len(functions) == 2 and functions[0] == functions[1]


def _of_lines(e: Evidence, found: dict[str, Cause], result: list[lines.LineCause]) -> list[Cause]:
    """Return ``result`` and the causes that the line profile shows and none of these explains."""
    explained = [(cause.id, cause.sentence, cause.evidence) for cause in found.values()]
    states = {name: CAUSES[name].states for name in (*found, *(line.named[0] for line in result))}
    result += lines.unexplained_lines(e, [*explained, *(line.named for line in result)], states)
    causes_of_lines = []
    for number, one in enumerate(result):
        name, sentence, evidence = one.named
        causes_of_lines.append(
            Cause(
                *(name, one.share, (one.share, one.share), sentence, evidence),
                confirmed=NOT_TESTABLE,
                basis=RECORD,
                witness=f"line {number}",
            )
        )
    return causes_of_lines


def unconfirmed_causes(e: Evidence, parts: FailedParts | None = None) -> list[Cause]:
    """Return what was expected, but is no cause, as no experiment confirms it; largest first."""
    parts = parts or NoFailedParts()
    found = parts.compute("the causes", lambda: witnesses(e), [])
    named = [
        _named_or_note(witness, e, parts) for witness in found if verdict(witness) == NOT_CONFIRMED
    ]
    return sorted((cause for cause in named if cause is not None), key=lambda cause: -cause.share)


def _named(witness: Witness, e: Evidence) -> Cause | None:
    """Return the cause that the witness's rule names.

    The share of an unconfirmed one is what was expected, if the record has it.
    """
    named = INDICATORS[witness.name].rule(e)
    if named is None:
        return None
    name, sentence, evidence = named
    judged, share, interval = verdict(witness), witness.share, witness.interval
    if witness.ladder is not None and witness.record is not None and witness.name not in BARS:
        evidence = evidence | {"expected": witness.record}
    if judged == NOT_CONFIRMED and witness.record:
        share, interval = witness.record, (witness.record, witness.record)
    share, interval = min(share, 1.0), (min(interval[0], 1.0), min(interval[1], 1.0))
    return Cause(
        *(name, share, interval, sentence, evidence),
        confirmed=judged,
        measured=witness.ladder,
        basis=witness.basis,
        witness=witness.name,
    )


def _within_waits_for_cores(cause: Cause, e: Evidence) -> Cause:
    """Return a cause that blames other programs, with at most what ranks waited for their cores.

    The experiment switched the communication or a rank's work off, and not the other programs. All
    ranks wait for a late one, so that their waits are longer than those for cores.
    """
    waiting = 1 if cause.witness in ("sharing", "noise") else e.report.size
    share = min(cause.share, e.foreign_wait_share * waiting)
    return replace(
        cause,
        share=share,
        interval=(share, share),
        confirmed=NOT_TESTABLE,
        measured=None,
        basis=RECORD,
    )


def operator_causes(found: list[Finding], known: list[Cause]) -> list[Cause]:
    """Return the findings inside the model as causes, except for those that are known already.

    Their share is an upper bound, and no experiment has confirmed it. It is at most what the known
    causes leave of a step. A finding in the main line of a known cause ``line`` is that cause.
    """
    left = 1 - sum(cause.share for cause in known)
    ids = {cause.id for cause in known}
    of_lines = [cause.evidence["lines"] for cause in known if cause.id == "line"]
    places = {place_of(lines[0]) for lines in of_lines if lines}
    return [
        Cause(
            *(finding.id, min(finding.share, left), (0.0, min(finding.share, left))),
            f"{finding.sentence} (at most this share; not confirmed by an experiment)",
            {**finding.evidence, "lines": finding.lines, "remedy": finding.remedy},
            confirmed=NOT_TESTABLE,
            basis=RECORD,
            witness=OPERATORS,
        )
        for finding in found
        if finding.id not in ids and not (finding.lines and place_of(finding.lines[0]) in places)
        if left >= MIN_SHARE
    ]


def split_usual(found: Iterable[Cause]) -> tuple[list[Cause], list[Cause]]:
    """Return the causes without usual costs, and the usual costs."""
    causes: list[Cause] = []
    usual: list[Cause] = []
    for cause in found:
        (usual if _is_usual(cause) else causes).append(cause)
    return causes, usual


def _is_usual(cause: Cause) -> bool:
    kind = CAUSES[cause.id]
    is_small = kind.is_usual and cause.share < USUAL_SHARE
    return is_small and float(cause.evidence.get("calls_a_step", 0.0)) <= kind.max_usual_calls


def _merge(one: Cause, other: Cause) -> Cause:
    """Merge two findings of the same cause: bars are disjoint and add up, other shares overlap."""
    if other.witness == ranks.BINDING:
        return one  # an experiment or a bar shows more than waits for cores
    if other.witness not in BARS:
        return max(one, other, key=lambda cause: cause.share)
    low, high = (a + b for a, b in zip(one.interval, other.interval, strict=True))
    return replace(one, share=one.share + other.share, interval=(low, high))


def uncertain_bars(w: Waterfall, named: Sequence[Cause] = ()) -> list[str]:
    """Return the bars that are above ``MIN_SHARE`` but may be close to zero.

    Without those for which one of the causes ``named`` stands, by what the record shows.
    """
    least = MIN_SHARE / 2
    known = {"exchange" if cause.witness in EXCHANGE_PARTS else cause.witness for cause in named}
    doubtful = (bar for bar in w.bars if bar.id not in known)
    return [bar.id for bar in doubtful if bar.of_step.mean >= MIN_SHARE and bar.of_step.low < least]


# Overlap


def without_overlap(causes: list[Cause], e: Evidence) -> list[Cause]:
    """Return the causes with disjoint shares, largest first; estimates come last.

    A cause that loses so much that less than ``MIN_SHARE`` remains is no cause of its own any
    more. It is listed as a sign in the evidence of the cause that keeps the time.
    """
    left = {cause.witness: cause for cause in causes}
    tested_first = sorted(INDICATORS.values(), key=lambda one: one.experiment is None)
    for specific in tested_first:
        for general, overlap in specific.overlaps.items():
            if specific.name in left and general in left:
                shares = (overlap(e), left[specific.name].share, left[general].share)
                _take(left, specific.name, general, max(min(shares), 0.0))
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
    assert all(0 < cause.share <= 1 + ROUNDING for cause in found), found
    assert sum(cause.share for cause in found) <= 1 + ROUNDING, found
    lost = sum(max(bar.of_step.mean, 0.0) for bar in e.waterfall.bars)
    of_bars = [cause for cause in found if cause.basis == EXPERIMENT]
    of_bars = [cause for cause in of_bars if cause.witness in (*BARS, *EXCHANGE_PARTS)]
    assert sum(cause.share for cause in of_bars) <= lost + ROUNDING, (found, lost)


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
