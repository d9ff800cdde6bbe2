"""Rules for slow communication: bytes, number of calls, time of the calls, or late ranks."""

from dataclasses import replace
from typing import Any

from ....plurals import counted
from ...figures.process_groups import Collective, Group
from ..descriptions import COMMUNICATION, CauseKind, Indicator
from ..evidence import LATENCY_BOUND_BYTES, Evidence, NamedCause
from ..exchanged_calls import ExchangedCalls
from ..gradient_sync import GradientSync
from ..rungs import Interval
from . import exchange_parts
from .layouts import sharded_exchange, tensor_exchange
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


def exchange(e: Evidence) -> NamedCause | None:
    """Return the cause of the communication time, or None without communication."""
    if not e.report.groups:
        return None
    group = max(e.report.groups, key=lambda group: group.transfer + group.wait)
    calls = _costliest_collective(e, group)
    if calls is None:
        return None
    if (said := late_without_cores(e)) is not None:
        return said
    if e.loss_share("transfer") < e.occasional_waits and calls.name != "barrier":
        return alternating(e)
    if calls.name == "barrier":
        return _barriers(e, calls)
    if (said := tensor_exchange(e, group, calls, _figures(e, calls), _line_text(e))) is not None:
        return said
    if (said := sharded_exchange(e, calls, _figures(e, calls))) is not None:
        return said
    g = e.gradients
    if g is not None and (said := _accumulation(e, g, calls) or _buckets(e, g, calls)):
        return said
    if calls.bytes / max(calls.count, 1) < LATENCY_BOUND_BYTES:
        return _latency(e, calls)
    return (_no_overlap(e, g, calls) if g is not None else None) or _bandwidth(e, calls)


def _costliest_collective(e: Evidence, group: Group) -> Collective | None:
    """Return the kind of collective with most time, without calls that are causes of their own."""
    found = [_without_parts(e, one) for one in group.collectives]
    return max(found, key=lambda one: one.wait + one.transfer, default=None)


def _without_parts(e: Evidence, calls: Collective) -> Collective:
    others = [one for one in exchange_parts.separate_calls(e) if _name(one) == calls.name]
    return replace(
        calls,
        count=max(calls.count - round(e.steps * sum(one.calls for one in others)), 0),
        bytes=max(calls.bytes - round(e.steps * sum(o.calls * o.bytes for o in others)), 0),
        wait=max(calls.wait - sum(one.wait for one in others), 0.0),
        transfer=max(calls.transfer - sum(one.transfer for one in others), 0.0),
    )


def _name(one: ExchangedCalls) -> str:
    return one.site.op.name.lower().replace("_", "-")


def _lines(e: Evidence) -> list[dict[str, object]]:
    """Return the lines of the collectives that are no causes of their own."""
    separate = exchange_parts.separate_calls(e)
    known = exchange_parts.lines_of([one for one in e.exchanged if one not in separate])
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


def _line_text(e: Evidence) -> str:
    lines = _lines(e)
    return f" (line {lines[0]['line']}: {lines[0]['code']})" if lines else ""


def _barriers(e: Evidence, calls: Collective) -> NamedCause:
    barriers = counted(calls.count / e.steps, "barrier")
    sentence = f"all ranks wait in {barriers} per step{_line_text(e)}"
    return "synchronisation", sentence, _figures(e, calls)


def _accumulation(e: Evidence, g: GradientSync, calls: Collective) -> NamedCause | None:
    """Return the cause if gradients are accumulated, but synchronized in each backward."""
    size = sum(e.first_facts.get("parameters", {}).values())
    if g.exchanging < MIN_SYNCED_BACKWARDS or g.bytes < MIN_SYNCED_BACKWARDS * (size or g.bytes):
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


def _latency(e: Evidence, calls: Collective) -> NamedCause:
    """Return the cause of slow small collectives: latency, or ranks that wait for a core.

    A few calls that take long while their threads wait for a core are not latency-bound: other
    threads compute on all cores. MIN_DELAYED is the limit for waiting for a core.
    """
    if said := noisy(e, e.loss_share("transfer")):
        return said
    figures = _figures(e, calls)
    each = e.loss_share("transfer") * e.step_s / max(figures["calls_a_step"], 1)
    lacking = e.other_threads_cpu_wait_share >= MIN_DELAYED * e.loss_share("transfer")
    if lacking and each >= SCHEDULER_DELAY_S and figures["calls_a_step"] < MAX_FEW_CALLS:
        sentence = (
            f"{calls.name} of {figures['bytes']:,.0f} bytes takes {1e3 * each:.2g} ms, because its "
            "threads wait for a core while other threads compute: leave a core of the node free"
        )
        return "jitter", sentence, figures | {"crowded": e.other_threads_cpu_wait_share}
    size = sum(e.first_facts.get("parameters", {}).values())
    g = e.gradients
    if g is not None and size and g.bytes_outside >= max(MIN_GRADIENT_SHARE * size, g.bytes):
        sentence = (
            f"gradients are synchronized after the backward in {counted(g.calls_outside, 'call')} "
            f"of {calls.name} per step with {figures['bytes']:,.0f} bytes each, and latency "
            f"dominates{_line_text(e)}: stack them, or use DistributedDataParallel"
        )
        return "exchange-latency", sentence, figures
    sentence = (
        f"each step calls {calls.name} {counted(figures['calls_a_step'], 'time')} with "
        f"{figures['bytes']:,.0f} bytes each, and latency dominates{_line_text(e)}"
    )
    return "exchange-latency", sentence, figures


def _no_overlap(e: Evidence, g: GradientSync, calls: Collective) -> NamedCause | None:
    """Return the cause if gradients are synchronized after the backward."""
    size = sum(e.first_facts.get("parameters", {}).values())
    if not size or g.bytes_outside < max(MIN_GRADIENT_SHARE * size, g.bytes):
        return None
    sentence = (
        f"gradients of {g.bytes_outside / 1e6:.3g} MB are synchronized after the backward, without "
        f"overlap{_line_text(e)}"
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


# Descriptions


def _rest(e: Evidence) -> float:
    """Return the part of the communication time that is no cause of its own."""
    return max(1 - sum(exchange_parts.tested_parts(e).values()), 0.0)


def _bar(e: Evidence) -> Interval | None:
    whole = exchange_parts.switched_off(e, "silent", "exchange")
    return whole.scaled(_rest(e)) if whole is not None else None


CAUSES = (
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
        lambda e: _rest(e) * exchange_parts.exchanged_share(e),
        _bar,
    ),
)
