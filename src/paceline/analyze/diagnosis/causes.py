"""Find what slows a training down, by rules over the figures of the ladder and the record.

``RULES`` maps each witness to the rule that names its cause. ``confirmation`` decides whether the
experiments confirm it, and ``overlap`` gives each second of a step to one cause only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .confirmation import (
    CONFIRMED,
    EXCHANGE_PARTS,
    NOT_CONFIRMED,
    NOT_TESTABLE,
    RECORD,
    Witness,
    measured,
    verdict,
)
from .evidence import MIN_SHARE, Evidence
from .exchanged_calls import CollectiveKind
from .ladder import BARS, Interval, RungResult, Waterfall
from .overlap import Cause, check_no_time_is_named_twice, ranked, without_overlap
from .rules import compute, exchange, exchange_parts, inputs, lines, pipeline, ranks, script
from .rules.failed_parts import FailedParts, NoFailedParts
from .rules.operators import Finding

__all__ = [
    "CONFIRMED",
    "MIN_SHARE",
    "NOT_CONFIRMED",
    "NOT_TESTABLE",
    "OPERATORS",
    "USUAL_SHARE",
    "Cause",
    "Evidence",
    "Witness",
    "causes",
    "operator_causes",
    "ranked",
    "split_usual",
    "uncertain_bars",
    "unconfirmed_causes",
    "witnesses",
]


BINDING = "binding"  # witness of waits for the few cores that ranks may use
OPERATORS = "operators"  # witness of causes from the profile of operators
# Losses that any data-parallel training has. A core alone has a higher clock, and more of the
# caches, than when all cores compute; gradients are exchanged in each step, and ranks wait for
# whichever is late. POP calls efficiencies of 80 % acceptable (https://pop-coe.eu/node/69).
USUAL_SHARE = 0.2  # of a step; below it, they are no causes
MAX_USUAL_CALLS = 3  # per step: with more small collectives, their number is the cause
_USUAL = ("shared-machine", "exchange-bandwidth", "exchange-latency", "jitter")


def witnesses(e: Evidence) -> list[Witness]:
    """Return the shares of a step's time, from experiments and from the record.

    Those of BARS come first. The others are part of the ideal step, as one rank alone has them too.
    """
    bar, share = e.waterfall.of_step, e.loss_share
    exchanged = share("transfer", doing=("transfer", "wait")) + e.occasional_waits
    all_exchange = _switched_off(e, "silent", bar("exchange"))
    parts = exchange_parts.parts(e)
    transferred = None
    if (broadcasts := measured(e, "broadcasts")) is not None:
        parts.pop(CollectiveKind.BUFFER, None)  # a better experiment measures it
        transferred = exchange_parts.transfer_of(e, CollectiveKind.BUFFER)
    rest = max(1 - sum(parts.values()), 0.0)
    exchanged -= (objects := exchange_parts.never_off(e))
    unmeasured = [Witness("objects", None, objects)] if objects else []
    unmeasured = [] if CollectiveKind.OBJECT in parts else unmeasured

    def part(factor: float) -> tuple[Interval | None, float]:
        scaled = all_exchange.scaled(factor) if all_exchange is not None else None
        return scaled, factor * exchanged

    return [
        Witness("sharing", bar("sharing"), None),
        Witness("uneven", bar("uneven"), e.compute_imbalance),
        Witness("exchange", *part(rest)),
        *(Witness(exchange_parts.WITNESSES[kind], *part(parts[kind])) for kind in parts),
        *unmeasured,
        Witness("broadcasts", broadcasts, transferred),
        Witness(
            "input", _switched_off(e, "cached", bar("input")), share("input", doing=("input",))
        ),
        Witness("validation", bar("validation"), share("validation", doing=("validation",))),
        Witness("checkpoint", bar("checkpoint"), share("checkpoint", doing=("checkpoint",))),
        Witness("bubble", None, share("bubble", doing=("bubble",))),
        Witness("script", None, share("other")),
        Witness("standing", None, script.off_core_share(e)),
        Witness(BINDING, None, ranks.waits_of_binding(e)),
        Witness("noise", None, ranks.foreign_delay_share(e)),
        Witness("threads", measured(e, "threads"), None),
        Witness("layout", measured(e, "layout"), None),
        Witness("precision", measured(e, "precision"), compute.float64_share(e)),
        Witness("allocator", measured(e, "allocator"), compute.page_fault_share(e)),
        Witness("memory", None, e.mean_usage("everything", "squeezed")),
        Witness("collector", measured(e, "collector"), compute.collecting_share(e)),
        Witness("interpreter", measured(e, "interpreter"), compute.interpreter_lock_share(e)),
        Witness("search", measured(e, "search"), compute.unused_search_share(e)),
    ]


def _switched_off(e: Evidence, rung: str, bar: Interval | None) -> Interval | None:
    """Return the bar below a rung, or None if the rung could switch nothing off."""

    def count(one: RungResult) -> int:
        return one.cached if rung == "cached" else one.silent

    results = e.rungs.get(rung, [])
    return bar if not results or any(map(count, results)) else None


Rule = Callable[[Evidence], tuple[str, str, dict[str, Any]] | None]

# For each witness, the rule that names its cause.
RULES: dict[str, Rule] = {
    "sharing": ranks.sharing,
    "uneven": ranks.uneven,
    "exchange": exchange.exchange,
    **{name: exchange_parts.rule_for(kind) for kind, name in exchange_parts.WITNESSES.items()},
    "broadcasts": exchange_parts.rule_for(CollectiveKind.BUFFER),
    "input": inputs.inputs,
    "validation": ranks.rule_for_phase("validation"),
    "checkpoint": ranks.rule_for_phase("checkpoint"),
    "bubble": pipeline.bubble,
    "script": script.script,
    "standing": script.off_core,
    BINDING: ranks.restricted_binding,
    "noise": ranks.noisy,
    "threads": ranks.threads,
    "layout": compute.layout,
    "precision": compute.precision,
    "allocator": compute.allocator,
    "memory": compute.memory,
    "collector": compute.collector,
    "interpreter": compute.interpreter,
    "search": compute.search,
}


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
    if not _LATE_RANK_CAUSES & set(found):
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
    both = [one.get("lines") for one in evidence]
    functions = [(found[0].get("file"), found[0].get("function")) for found in both if found]
    return len(functions) == 2 and functions[0] == functions[1]


def _of_lines(e: Evidence, found: dict[str, Cause], result: list[lines.LineCause]) -> list[Cause]:
    """Return ``result`` and the causes that the line profile shows and none of these explains."""
    explained = [(one.id, one.sentence, one.evidence) for one in found.values()]
    result += lines.unexplained_lines(e, [*explained, *(one.named for one in result)])
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


# Causes that explain why ranks wait for one of them.
_LATE_RANK_CAUSES = {
    *("slow-rank", "slow-host", "uneven-data", "validation-on-one-rank", "checkpoint-on-one-rank"),
}


def unconfirmed_causes(e: Evidence, parts: FailedParts | None = None) -> list[Cause]:
    """Return what was expected, but is no cause, as no experiment confirms it; largest first."""
    parts = parts or NoFailedParts()
    found = parts.compute("the causes", lambda: witnesses(e), [])
    named = [_named_or_note(one, e, parts) for one in found if verdict(one) == NOT_CONFIRMED]
    return sorted((one for one in named if one is not None), key=lambda cause: -cause.share)


def _named(witness: Witness, e: Evidence) -> Cause | None:
    """Return the cause that the witness's rule names.

    The share of an unconfirmed one is what was expected, if the record has it.
    """
    named = RULES[witness.name](e)
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
    places = {_place_of(lines[0]) for lines in of_lines if lines}
    return [
        Cause(
            *(one.id, min(one.share, left), (0.0, min(one.share, left))),
            f"{one.sentence} (at most this share; not confirmed by an experiment)",
            {**one.evidence, "lines": one.lines, "remedy": one.remedy},
            confirmed=NOT_TESTABLE,
            basis=RECORD,
            witness=OPERATORS,
        )
        for one in found
        if one.id not in ids and not (one.lines and _place_of(one.lines[0]) in places)
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
    if cause.id not in _USUAL or cause.share >= USUAL_SHARE:
        return False
    many = float(cause.evidence.get("calls_a_step", 0.0)) > MAX_USUAL_CALLS
    return not (many and cause.id == "exchange-latency")


def _place_of(line: dict[str, Any]) -> tuple[str, Any]:
    """Return the file of a line without its folders, and its number."""
    return str(line.get("file", "")).rpartition("/")[2], line.get("line")


def _merge(one: Cause, other: Cause) -> Cause:
    """Merge two findings of the same cause: bars are disjoint and add up, other shares overlap."""
    if other.witness == BINDING:
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
    known = {"exchange" if one.witness in EXCHANGE_PARTS else one.witness for one in named}
    doubtful = (bar for bar in w.bars if bar.id not in known)
    return [bar.id for bar in doubtful if bar.of_step.mean >= MIN_SHARE and bar.of_step.low < least]
