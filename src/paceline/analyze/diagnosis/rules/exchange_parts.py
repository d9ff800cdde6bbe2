"""Rules for collectives that are no exchange of gradients: buffers, metrics, objects, barriers.

All communication together is switched off by an experiment. The record divides what that saves
among the collectives, by what they carry. DDP's broadcasts of buffers have an experiment of their
own if they may be long.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ....plurals import counted
from ....record.experiments.rung import NO_BROADCASTS
from ....record.ring.states import Op
from ..descriptions import COMMUNICATION, CauseKind, Experiment, Facts, Indicator, Rule, saved
from ..evidence import MIN_SHARE, Evidence, NamedCause
from ..exchanged_calls import CollectiveKind, ExchangedCalls
from ..rungs import Interval, reference_name

WITNESSES = {
    CollectiveKind.BUFFER: "buffers",
    CollectiveKind.METRIC: "metrics",
    CollectiveKind.OBJECT: "objects",
    CollectiveKind.BARRIER: "barriers",
}
MAIN_PART = 0.5  # of the communication time: a larger part is reported separately, however short
MAX_LINES = 5


def parts(e: Evidence) -> dict[CollectiveKind, float]:
    """Return the parts of the communication time, by kind; those below MIN_SHARE are left out.

    A wait for a late rank belongs to that rank. Only a barrier keeps the waits that no single rank
    explains, because nothing else would make the ranks wait.
    """
    occasional = e.occasional_waits
    switched_off = [one for one in e.exchanged if not _is_never_off(one)]
    waits = sum(one.wait for one in e.exchanged)
    kept = min(occasional / waits, 1.0) if waits else 0.0
    times: dict[CollectiveKind, float] = defaultdict(float)
    for one in switched_off:
        is_barrier = one.site.kind == CollectiveKind.BARRIER
        times[one.site.kind] += one.transfer + (kept * one.wait if is_barrier else 0.0)
    transfer = e.loss_share("transfer") - never_off(e)
    whole = max(transfer + occasional, sum(times.values()))
    return {
        kind: times[kind] / whole
        for kind in WITNESSES
        if times[kind] and times[kind] >= min(MIN_SHARE, MAIN_PART * whole)
    }


def _is_never_off(one: ExchangedCalls) -> bool:
    """Return whether no experiment can switch a collective off, see NoCommunicationGroup."""
    return one.site.kind == CollectiveKind.OBJECT and one.site.op in (Op.BROADCAST, Op.SCATTER)


def never_off(e: Evidence) -> float:
    """Return the share of transfers of objects that no experiment can switch off."""
    return sum(one.transfer for one in e.exchanged if _is_never_off(one))


def separate_calls(e: Evidence) -> list[ExchangedCalls]:
    """Return the collectives that are causes of their own."""
    kinds = parts(e)
    return [one for one in e.exchanged if one.site.kind in kinds or _is_never_off(one)]


def calls_of(e: Evidence, *kinds: CollectiveKind) -> list[ExchangedCalls]:
    """Return the collectives of these kinds, those with most time first."""
    return [one for one in e.exchanged if one.site.kind in kinds]


def transfer_of(e: Evidence, kind: CollectiveKind) -> float:
    """Return the share of transfers of a kind, without waits for a late rank."""
    return sum(one.transfer for one in calls_of(e, kind))


def lines_of(calls: list[ExchangedCalls]) -> list[dict[str, object]]:
    """Return the lines of these collectives, as the evidence of a cause has them."""
    whole = sum(one.transfer + one.wait for one in calls) or 1.0
    located = [one for one in calls if one.site.line is not None]
    return [one.as_line((one.transfer + one.wait) / whole) for one in located[:MAX_LINES]]


def rule_for(kind: CollectiveKind) -> Rule:
    """Return the rule that names the cause of one kind of collective."""

    def rule(e: Evidence) -> NamedCause | None:
        found = calls_of(e, kind)
        if not found:
            return None
        count = sum(one.calls for one in found)
        size = sum(one.calls * one.bytes for one in found) / max(count, 1e-9)
        lines = lines_of(found)
        figures: dict[str, Any] = {
            "kind": str(kind),
            "collective": found[0].site.op.name.lower().replace("_", "-"),
            "bytes": size,
            "calls_a_step": count,
            "lines": lines,
        }
        text = f" (line {lines[0]['line']}: {lines[0]['code']})" if lines else ""
        name, sentence = _NAMED[kind](count, size)
        return name, sentence + text, figures

    return rule


def _buffers(count: float, size: float) -> tuple[str, str]:
    return "buffer-broadcast", (
        f"DDP broadcasts the buffers of the model before each forward, in "
        f"{_times(count, 'collective')} of {size / 1e3:.3g} kB per step"
    )


def _metrics(count: float, size: float) -> tuple[str, str]:
    return "metric-collectives", (
        f"{_times(count, 'collective')} of {size:,.0f} bytes per step exchange metrics"
    )


def _objects(count: float, size: float) -> tuple[str, str]:
    return "object-collectives", (
        f"Python objects are pickled and exchanged in {_times(count, 'collective')} of "
        f"{size:,.0f} bytes per step"
    )


def _barriers(count: float, size: float) -> tuple[str, str]:
    return "synchronisation", f"all ranks wait in {_times(count, 'barrier')} per step"


def _times(count: float, what: str) -> str:
    """Return "2 barriers", or "0.1 barriers" if not every step has one."""
    return counted(round(count), what) if count >= 1 else f"{count:.2g} {what}s"


_NAMED: dict[CollectiveKind, Callable[[float, float], tuple[str, str]]] = {
    CollectiveKind.BUFFER: _buffers,
    CollectiveKind.METRIC: _metrics,
    CollectiveKind.OBJECT: _objects,
    CollectiveKind.BARRIER: _barriers,
}


# Descriptions


def switched_off(e: Evidence, rung: str, bar: str) -> Interval | None:
    """Return the bar below a rung, or None if the rung could switch nothing off."""
    results = e.rungs.get(rung, [])
    counts = [one.cached if rung == "cached" else one.silent for one in results]
    return e.waterfall.of_step(bar) if not results or any(counts) else None


def tested_parts(e: Evidence) -> dict[CollectiveKind, float]:
    """Return the ``parts`` that only the experiment without any communication measures."""
    found = parts(e)
    if BROADCASTS.saving(e) is not None:
        found.pop(CollectiveKind.BUFFER, None)
    return found


def exchanged_share(e: Evidence) -> float:
    """Return the share of a step in communication that the experiment can switch off."""
    found = e.loss_share("transfer", doing=("transfer", "wait")) + e.occasional_waits
    return found - never_off(e)


def _part(kind: CollectiveKind, title: str, definition: str) -> Indicator:
    """Return the indicator of a part of the communication."""

    def record(e: Evidence) -> float:
        found = tested_parts(e)
        return found[kind] * exchanged_share(e) if kind in found else never_off(e)

    def ladder(e: Evidence) -> Interval | None:
        whole, factor = switched_off(e, "silent", "exchange"), tested_parts(e).get(kind)
        return whole.scaled(factor) if whole is not None and factor is not None else None

    def is_present(e: Evidence) -> bool:
        is_object = kind == CollectiveKind.OBJECT
        return kind in tested_parts(e) or (is_object and never_off(e) > 0)

    return Indicator(
        WITNESSES[kind], title, definition, rule_for(kind), record, ladder, is_present=is_present
    )


def _why_not_off(facts: Facts, used: Facts) -> str:
    if any(one.get("broadcasting") for one in used):
        return ""
    return "the script broadcasts the buffers itself, and not DistributedDataParallel"


BROADCASTS = Experiment(
    NO_BROADCASTS,
    reference_name(NO_BROADCASTS),
    "all ranks, no broadcasts of buffers",
    NO_BROADCASTS,
    lambda first: first.broadcast_share,
    "interleaved with it: broadcasts of buffers",
    why_void=_why_not_off,
)

CAUSES = (
    CauseKind(
        "synchronisation",
        COMMUNICATION,
        "waiting for a value, an output or a barrier",
        "barriers take 5 % of a step or half of the communication time, with the line of the "
        "largest one; also if a line of the script waits for a value (`.item()`), prints or waits."
        " A line that computes its value is `script`",
        states=("other",),
    ),
    CauseKind(
        "buffer-broadcast",
        COMMUNICATION,
        "broadcasts of the model's buffers",
        "steps are shorter without DDP's broadcasts of buffers; with the line of the forward. If "
        "that was not tested: they take 5 % of a step or half of the communication time",
    ),
    CauseKind(
        "metric-collectives",
        COMMUNICATION,
        "collectives of metrics",
        "collectives of at most 1 KiB outside of a backward, which carry no gradients or "
        "parameters, take 5 % of a step or half of the communication time, with the line",
    ),
    CauseKind(
        "object-collectives",
        COMMUNICATION,
        "exchanges of Python objects",
        "collectives of Python objects (`all_gather_object`, `broadcast_object_list`, ...) take "
        "5 % of a step or half of the communication time, with the line",
    ),
)

INDICATORS = (
    _part(
        CollectiveKind.BUFFER,
        "broadcasts of buffers",
        "Part of the exchange: transfers of DDP's broadcasts of buffers, relative to all transfers"
        " and waits of the exchange in the record.",
    ),
    _part(
        CollectiveKind.METRIC,
        "exchange of metrics",
        "Part of the exchange: transfers of collectives outside of a backward with at most 1 KiB, "
        "relative to all transfers and waits of the exchange in the record.",
    ),
    _part(
        CollectiveKind.OBJECT,
        "exchange of objects",
        "Part of the exchange: transfers of pickled Python objects, relative to all transfers and "
        "waits of the exchange in the record.",
    ),
    _part(
        CollectiveKind.BARRIER,
        "barriers",
        "Part of the exchange: barriers, with the waits that no single rank explains, relative to "
        "all transfers and waits of the exchange in the record.",
    ),
    Indicator(
        "broadcasts",
        "broadcasts of buffers",
        "Time of steps with DDP's broadcasts of buffers, minus that of steps without them, "
        "interleaved. The record: their transfers.",
        rule_for(CollectiveKind.BUFFER),
        lambda e: transfer_of(e, CollectiveKind.BUFFER) if BROADCASTS.saving(e) else None,
        experiment=BROADCASTS,
        overlaps={"exchange": lambda e: saved(BROADCASTS, e)},
    ),
)
