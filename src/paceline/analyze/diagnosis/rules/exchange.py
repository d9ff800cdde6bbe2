"""Rules for slow communication: bytes, number of calls, time of the calls, or late ranks.

All communication together is switched off by an experiment. The record divides what that saves
between the exchange of gradients and other collectives, by what these carry: buffers, metrics,
objects, barriers. DDP's broadcasts of buffers have an experiment of their own if they may be long.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from ....plurals import counted
from ....record.experiments.lines.sidecar import CollectiveKind
from ....record.experiments.rung import NO_BROADCASTS
from ....record.ring.states import Op
from ...figures.process_groups import Collective, Group
from ..descriptions import COMMUNICATION, CauseKind, Experiment, Indicator, Rule, saved
from ..evidence import LATENCY_BOUND_BYTES, MIN_SHARE, Evidence, NamedCause
from ..exchanged_calls import ExchangedCalls, GradientSync
from ..rungs import Facts, Interval, reference_name
from .layouts import sharded_exchange, tensor_exchange
from .lines import at_line
from .ranks import alternating, late_without_cores, noisy

MAX_OVERLAP = 0.1  # share of the exchange, below which it counts as exposed
MIN_SYNCED_BACKWARDS = 1.5  # per optimizer step: then not only the last one synchronizes
MIN_DELAYED = 0.5  # of the communication time, spent waiting for a core: then that is the cause
SCHEDULER_DELAY_S = 1e-3  # a small collective that takes longer waits for the OS scheduler
MAX_FEW_CALLS = 10  # per step: with more, the number of calls is the cause
MIN_SMALL_BUCKETS = 6  # buckets per backward
SMALL_BUCKET_BYTES = 1 << 20  # below it, buckets are too small if there are many
# DDP's default. With it, larger models have several buckets, unless a single parameter is larger
# than SINGLE_BUCKET_BYTES.
DDP_BUCKET_CAP_BYTES = 25 << 20
SINGLE_BUCKET_BYTES = 26 << 20
MIN_GRADIENT_SHARE = 0.5  # of the parameters' bytes: then the communication is of gradients
WITNESSES = {
    CollectiveKind.BUFFER: "buffers",
    CollectiveKind.METRIC: "metrics",
    CollectiveKind.OBJECT: "objects",
    CollectiveKind.BARRIER: "barriers",
}
MAIN_PART = 0.5  # of the communication time: a larger part is reported separately, however short
MAX_LINES = 5


def exchange(e: Evidence) -> NamedCause | None:
    """Return the cause of the communication time, or None without communication."""
    if not e.report.groups:
        return None
    group = max(e.report.groups, key=lambda group: group.transfer + group.wait)
    calls = _costliest_collective(e, group)
    if calls is None:
        return None
    if (named := late_without_cores(e)) is not None:
        return named
    if e.loss_share("transfer") < e.occasional_waits and calls.name != "barrier":
        return alternating(e)
    if calls.name == "barrier":
        return _barriers(e, calls)
    if (
        named := tensor_exchange(e, group, calls, _figures(e, calls), at_line(_lines(e)))
    ) is not None:
        return named
    if (named := sharded_exchange(e, calls, _figures(e, calls))) is not None:
        return named
    g = e.gradients
    if g is not None and (named := _accumulation(e, g, calls) or _buckets(e, g, calls)):
        return named
    if calls.bytes / max(calls.count, 1) < LATENCY_BOUND_BYTES:
        return _latency(e, calls)
    return (_no_overlap(e, g, calls) if g is not None else None) or _bandwidth(e, calls)


def _costliest_collective(e: Evidence, group: Group) -> Collective | None:
    """Return the kind of collective with most time, without calls that are causes of their own."""
    found = [_without_parts(e, collective) for collective in group.collectives]
    return max(found, key=lambda one: one.wait + one.transfer, default=None)


def _without_parts(e: Evidence, calls: Collective) -> Collective:
    others = [other for other in separate_calls(e) if other.name == calls.name]
    return replace(
        calls,
        count=max(calls.count - round(e.steps * sum(other.calls for other in others)), 0),
        bytes=max(calls.bytes - round(e.steps * sum(o.calls * o.bytes for o in others)), 0),
        wait=max(calls.wait - sum(other.wait for other in others), 0.0),
        transfer=max(calls.transfer - sum(other.transfer for other in others), 0.0),
    )


def _lines(e: Evidence) -> list[dict[str, object]]:
    """Return the lines of the collectives that are no causes of their own."""
    separate = separate_calls(e)
    known = lines_of([calls for calls in e.exchanged if calls not in separate])
    return known or [*e.lines.get("transfer", []), *e.lines.get("wait", [])][:5]


def _figures(e: Evidence, calls: Collective) -> dict[str, Any]:
    return {
        "collective": calls.name,
        "bytes": calls.bytes / max(calls.count, 1),
        "calls_a_step": calls.count / e.steps,
        "busbw_GB_s": calls.busbw,
        "hidden": calls.hidden,
        "lines": _lines(e),
    }


def _barriers(e: Evidence, calls: Collective) -> NamedCause:
    barriers = counted(calls.count / e.steps, "barrier")
    sentence = f"all ranks wait in {barriers} per step{at_line(_lines(e))}"
    return "synchronisation", sentence, _figures(e, calls)


def _accumulation(e: Evidence, g: GradientSync, calls: Collective) -> NamedCause | None:
    """Return the cause if gradients are accumulated, but synchronized in each backward."""
    least = MIN_SYNCED_BACKWARDS * (e.parameter_bytes or g.bytes)
    if g.exchanging < MIN_SYNCED_BACKWARDS or g.bytes < least:
        return None
    sentence = (
        f"gradients are synchronized in {counted(g.exchanging, 'backward')} of each optimizer "
        "step, and once is enough (DDP's no_sync)"
    )
    return "accumulation-exchange", sentence, _figures(e, calls) | {"backwards": g.backwards}


def _buckets(e: Evidence, g: GradientSync, calls: Collective) -> NamedCause | None:
    """Return the cause if there are too many buckets, or a single one, which cannot overlap."""
    ddp = e.first_facts.get("ddp", {})
    if not ddp or not g.exchanging:
        return None
    each = g.calls / g.exchanging
    figures = _figures(e, calls) | {"buckets": each, "bucket_bytes": ddp.get("bucket_bytes")}
    if (
        each >= MIN_SMALL_BUCKETS
        and g.bytes_per_call < SMALL_BUCKET_BYTES
        and ddp["bytes"] >= MIN_SMALL_BUCKETS * g.bytes_per_call / 2
    ):
        sentence = (
            f"DDP has {counted(each, 'bucket')} of {g.bytes_per_call / 1e3:.3g} kB in each "
            "backward: fewer and larger buckets (bucket_cap_mb) take less time"
        )
        return "bucket-size", sentence, figures
    if (
        each < 1.5
        and ddp["bytes"] >= SINGLE_BUCKET_BYTES
        and ddp["bucket_bytes"] > DDP_BUCKET_CAP_BYTES
    ):
        sentence = (
            f"one bucket of {ddp['bytes'] / 1e6:.3g} MB contains all gradients, so their "
            "synchronization does not overlap with the backward (DDP's bucket_cap_mb)"
        )
        return "bucket-size", sentence, figures
    return None


def _is_after_backward(e: Evidence, g: GradientSync) -> bool:
    """Return whether gradients are synchronized after the backward."""
    size = e.parameter_bytes
    return bool(size) and g.bytes_outside >= max(MIN_GRADIENT_SHARE * size, g.bytes)


def _latency(e: Evidence, calls: Collective) -> NamedCause:
    """Return the cause of slow small collectives: latency, or ranks that wait for a core.

    A few calls that take long while their threads wait for a core are not latency-bound: other
    threads compute on all cores. MIN_DELAYED is the limit for waiting for a core.
    """
    if named := noisy(e, e.loss_share("transfer")):
        return named
    figures = _figures(e, calls)
    each = e.loss_share("transfer") * e.step_s / max(figures["calls_a_step"], 1)
    lacking = e.other_threads_cpu_wait_share >= MIN_DELAYED * e.loss_share("transfer")
    if lacking and each >= SCHEDULER_DELAY_S and figures["calls_a_step"] < MAX_FEW_CALLS:
        sentence = (
            f"{calls.name} of {figures['bytes']:,.0f} bytes takes {1e3 * each:.2g} ms, because its "
            "threads wait for a core while other threads compute: leave a core of the node free"
        )
        return "jitter", sentence, figures | {"crowded": e.other_threads_cpu_wait_share}
    g = e.gradients
    if g is not None and _is_after_backward(e, g):
        sentence = (
            f"gradients are synchronized after the backward in {counted(g.calls_outside, 'call')} "
            f"of {calls.name} per step with {figures['bytes']:,.0f} bytes each, and latency "
            f"dominates{at_line(_lines(e))}: stack them, or use DistributedDataParallel"
        )
        return "exchange-latency", sentence, figures
    sentence = (
        f"each step calls {calls.name} {counted(figures['calls_a_step'], 'time')} with "
        f"{figures['bytes']:,.0f} bytes each, and latency dominates{at_line(_lines(e))}"
    )
    return "exchange-latency", sentence, figures


def _no_overlap(e: Evidence, g: GradientSync, calls: Collective) -> NamedCause | None:
    """Return the cause if gradients are synchronized after the backward."""
    if not _is_after_backward(e, g):
        return None
    sentence = (
        f"gradients of {g.bytes_outside / 1e6:.3g} MB are synchronized after the backward, without "
        f"overlap{at_line(_lines(e))}"
    )
    return "no-overlap", sentence, _figures(e, calls)


def _bandwidth(e: Evidence, calls: Collective) -> NamedCause:
    figures = _figures(e, calls)
    rate = f", {calls.busbw:.2g} GB/s" if calls.busbw is not None else ""
    hosts = len(set(e.report.hosts))
    rate += f" between {hosts} nodes" * (hosts > 1)
    exposed = calls.hidden <= MAX_OVERLAP * (calls.wait + calls.transfer)
    overlap = ", and hardly overlaps with computation" if exposed else ""
    sentence = (
        f"{calls.name} of {figures['bytes'] / 1e6:.3g} MB is limited by bandwidth{rate}{overlap}"
    )
    return "exchange-bandwidth", sentence, figures


# Collectives that are no exchange of gradients: buffers, metrics, objects, barriers


def parts(e: Evidence) -> dict[CollectiveKind, float]:
    """Return the parts of the communication time, by kind; those below MIN_SHARE are left out.

    A wait for a late rank belongs to that rank. Only a barrier keeps the waits that no single rank
    explains, because nothing else would make the ranks wait.
    """
    occasional = e.occasional_waits
    switched_off = [calls for calls in e.exchanged if not _is_never_off(calls)]
    waits = sum(calls.wait for calls in e.exchanged)
    kept = min(occasional / waits, 1.0) if waits else 0.0
    times: dict[CollectiveKind, float] = defaultdict(float)
    for calls in switched_off:
        is_barrier = calls.site.kind == CollectiveKind.BARRIER
        times[calls.site.kind] += calls.transfer + (kept * calls.wait if is_barrier else 0.0)
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
    return sum(calls.transfer for calls in e.exchanged if _is_never_off(calls))


def separate_calls(e: Evidence) -> list[ExchangedCalls]:
    """Return the collectives that are causes of their own."""
    kinds = parts(e)
    return [calls for calls in e.exchanged if calls.site.kind in kinds or _is_never_off(calls)]


def calls_of(e: Evidence, *kinds: CollectiveKind) -> list[ExchangedCalls]:
    """Return the collectives of these kinds, those with most time first."""
    return [calls for calls in e.exchanged if calls.site.kind in kinds]


def lines_of(calls: list[ExchangedCalls]) -> list[dict[str, object]]:
    """Return the lines of these collectives, as the evidence of a cause has them."""
    whole = sum(call.transfer + call.wait for call in calls) or 1.0
    return [
        call.site.line.evidence((call.transfer + call.wait) / whole, call.site.what)
        for call in calls
        if call.site.line is not None
    ][:MAX_LINES]


# Id and sentence of the cause of each kind: not every step has a call.
_NAMED = {
    CollectiveKind.BUFFER: (
        "buffer-broadcast",
        "DDP broadcasts the buffers of the model before each forward, in {times} of {kb:.3g} kB "
        "per step",
    ),
    CollectiveKind.METRIC: (
        "metric-collectives",
        "{times} of {size:,.0f} bytes per step exchange metrics",
    ),
    CollectiveKind.OBJECT: (
        "object-collectives",
        "Python objects are pickled and exchanged in {times} of {size:,.0f} bytes per step",
    ),
    CollectiveKind.BARRIER: ("synchronisation", "all ranks wait in {times} per step"),
}


def rule_for(kind: CollectiveKind) -> Rule:
    """Return the rule that names the cause of one kind of collective."""

    def rule(e: Evidence) -> NamedCause | None:
        found = calls_of(e, kind)
        if not found:
            return None
        count = sum(calls.calls for calls in found)
        size = sum(calls.calls * calls.bytes for calls in found) / max(count, 1e-9)
        lines = lines_of(found)
        figures: dict[str, Any] = {
            "kind": str(kind),
            "collective": found[0].name,
            "bytes": size,
            "calls_a_step": count,
            "lines": lines,
        }
        name, sentence = _NAMED[kind]
        what = "barrier" if kind == CollectiveKind.BARRIER else "collective"
        times = counted(round(count), what) if count >= 1 else f"{count:.2g} {what}s"
        return (
            name,
            sentence.format(times=times, size=size, kb=size / 1e3) + at_line(lines),
            figures,
        )

    return rule


# Descriptions


def _rest(e: Evidence) -> float:
    """Return the part of the communication time that is no cause of its own."""
    return max(1 - sum(tested_parts(e).values()), 0.0)


def _bar(e: Evidence) -> Interval | None:
    whole = switched_off(e, "silent", "exchange")
    return whole.scaled(_rest(e)) if whole is not None else None


def switched_off(e: Evidence, rung: str, bar: str) -> Interval | None:
    """Return the bar below a rung, or None if the rung could switch nothing off."""
    results = e.rungs.get(rung, [])
    counts = [result.cached if rung == "cached" else result.silent for result in results]
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
    if any(usage.get("broadcasting") for usage in used):
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
    CauseKind(
        "accumulation-exchange",
        COMMUNICATION,
        "gradient synchronization in every backward of a step",
        "several backwards of an optimizer step synchronize all gradients",
    ),
    CauseKind(
        "bucket-size",
        COMMUNICATION,
        "gradient synchronization with an unsuitable bucket size",
        "DDP has six or more buckets below 1 MiB, or one bucket of 26 MiB or more because of "
        "`bucket_cap_mb`",
    ),
    CauseKind(
        "exchange-latency",
        COMMUNICATION,
        "many small collectives",
        "collectives have less than 256 KiB each, with the line",
        is_usual=True,
        max_usual_calls=3,
    ),
    CauseKind(
        "no-overlap",
        COMMUNICATION,
        "gradient synchronization after the backward",
        "gradients are all-reduced after the backward, with the line",
    ),
    CauseKind(
        "exchange-bandwidth",
        COMMUNICATION,
        "communication limited by bandwidth",
        "none of the other causes of communication applies",
        is_usual=True,
    ),
)

INDICATORS = (
    Indicator(
        "exchange",
        "exchange",
        "Throughput of all ranks with their batches in memory: without communication, minus with "
        "communication.",
        exchange,
        lambda e: _rest(e) * exchanged_share(e),
        _bar,
    ),
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
        lambda e: (
            sum(calls.transfer for calls in calls_of(e, CollectiveKind.BUFFER))
            if BROADCASTS.saving(e)
            else None
        ),
        experiment=BROADCASTS,
        overlaps={"exchange": lambda e: saved(BROADCASTS, e)},
    ),
)
