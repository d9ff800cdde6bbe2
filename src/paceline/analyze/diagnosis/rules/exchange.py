"""What the exchange costs, and why: its bytes, its calls, when they are made, or who is late."""

from typing import Any

from ...figures.process_groups import Collective, Group
from ..evidence import SMALL, Evidence, Said
from ..gradient_sync import Gradients
from .ranks import noisy, turns

HIDDEN = 0.1  # of the exchange is covered by computing at most, if nothing overlaps
SPARED = 1.5  # backwards of an optimizer step that exchange: more than the last one
DELAYED = 0.5  # of the exchange's time a rank waits for a core, if that is what it takes
TURN = 1e-3  # s: a small exchange that takes longer waits for the scheduler, if a core is lacking
FEW = 10  # calls a step: more are what costs, whatever each of them waits for
MANY = 6  # buckets of a backward
BUCKET = 1 << 20  # bytes: of a bucket that is too small where there are many
BUCKET_CAP = 25 << 20  # bytes: DDP's own; it leaves several buckets for more than that ...
WHOLE = 26 << 20  # ... unless a single parameter is as large
GRADIENTS = 0.5  # of the parameters' bytes are exchanged at least, if these are the gradients


def exchange(e: Evidence) -> Said | None:
    """What stands behind the time that the exchange takes."""
    if not e.report.groups:
        return None
    group = max(e.report.groups, key=lambda group: group.transfer + group.wait)
    calls = _main(group)
    if calls is None:
        return None
    if e.share("transfer") < e.in_turns and calls.name != "barrier":
        return turns(e)
    if calls.name == "barrier":
        return _barriers(e, calls)
    g = e.gradients
    if g is not None and (said := _spared(e, g, calls) or _buckets(e, g, calls)):
        return said
    if calls.bytes / max(calls.count, 1) < SMALL:
        return _latency(e, calls)
    return (_after(e, g, calls) if g is not None else None) or _bandwidth(e, calls)


def _main(group: Group) -> Collective | None:
    return max(group.collectives, key=lambda one: one.wait + one.transfer, default=None)


def _figures(e: Evidence, calls: Collective) -> dict[str, Any]:
    return {
        "collective": calls.name,
        "bytes": calls.bytes / max(calls.count, 1),
        "calls_a_step": calls.count / e.steps,
        "busbw_GB_s": calls.busbw,
        "hidden": calls.hidden,
        "lines": [*e.lines.get("transfer", []), *e.lines.get("wait", [])][:5],
    }


def _where(e: Evidence) -> str:
    lines = e.lines.get("transfer") or e.lines.get("wait") or []
    return f" (line {lines[0]['line']}: {lines[0]['code']})" if lines else ""


def _barriers(e: Evidence, calls: Collective) -> Said:
    sentence = f"{calls.count / e.steps:.3g} barriers a step hold all ranks{_where(e)}"
    return "synchronisation", sentence, _figures(e, calls)


def _spared(e: Evidence, g: Gradients, calls: Collective) -> Said | None:
    """Gradients that are accumulated, and exchanged in each backward."""
    size = sum(e.said.get("parameters", {}).values())
    if g.exchanging < SPARED or g.bytes < SPARED * (size or g.bytes):
        return None
    sentence = (
        f"gradients are exchanged in {g.exchanging:.3g} backwards of each optimizer step, and "
        "one exchange would do (DDP's no_sync)"
    )
    return "accumulation-exchange", sentence, _figures(e, calls) | {"backwards": g.backwards}


def _buckets(e: Evidence, g: Gradients, calls: Collective) -> Said | None:
    """Too many of them, or a single one, which nothing can overlap with."""
    ddp = e.said.get("ddp", {})
    if not ddp or not g.exchanging:
        return None
    each = g.calls / g.exchanging
    figures = _figures(e, calls) | {"buckets": each, "bucket_bytes": ddp.get("bucket_bytes")}
    if each >= MANY and g.a_call < BUCKET and ddp["bytes"] >= MANY * g.a_call / 2:
        sentence = (
            f"{each:.3g} buckets a backward of {g.a_call / 1e3:.3g} kB each: fewer and larger "
            "ones (DDP's bucket_cap_mb) cost less"
        )
        return "bucket-size", sentence, figures
    if each < 1.5 and ddp["bytes"] >= WHOLE and ddp["bucket_bytes"] > BUCKET_CAP:
        sentence = (
            f"one bucket of {ddp['bytes'] / 1e6:.3g} MB holds all gradients, so none of its "
            "exchange overlaps with the backward (DDP's bucket_cap_mb)"
        )
        return "bucket-size", sentence, figures
    return None


def _latency(e: Evidence, calls: Collective) -> Said:
    """Many small ones; where their ranks lack a core for half as long, that is why. Few that take
    long while their threads lack one are no latency either: others compute on all cores."""
    if e.delayed >= DELAYED * e.share("transfer") and (said := noisy(e)):
        return said
    figures = _figures(e, calls)
    each = e.share("transfer") * e.step_s / max(figures["calls_a_step"], 1)
    lacking = e.crowded >= DELAYED * e.share("transfer")
    if lacking and each >= TURN and figures["calls_a_step"] < FEW:
        sentence = (
            f"{calls.name}s of {figures['bytes']:,.0f} bytes take {1e3 * each:.2g} ms, as their "
            "threads wait for a core while others compute: leave a core of the host free"
        )
        return "jitter", sentence, figures | {"crowded": e.crowded}
    sentence = (
        f"{figures['calls_a_step']:.3g} {calls.name} a step of {figures['bytes']:,.0f} bytes "
        f"each: the exchange is its latency{_where(e)}"
    )
    return "exchange-latency", sentence, figures


def _after(e: Evidence, g: Gradients, calls: Collective) -> Said | None:
    """Gradients that are exchanged when the backward is over."""
    size = sum(e.said.get("parameters", {}).values())
    if not size or g.bytes_outside < max(GRADIENTS * size, g.bytes):
        return None
    sentence = (
        f"gradients of {g.bytes_outside / 1e6:.3g} MB are exchanged after the backward, so "
        f"nothing overlaps{_where(e)}"
    )
    return "no-overlap", sentence, _figures(e, calls)


def _bandwidth(e: Evidence, calls: Collective) -> Said:
    figures = _figures(e, calls)
    rate = f" at {calls.busbw:.2g} GB/s" if calls.busbw is not None else ""
    hosts = len(set(e.report.hosts))
    rate += f" between {hosts} hosts" * (hosts > 1)
    covered = calls.hidden <= HIDDEN * (calls.wait + calls.transfer)
    nothing = ", and nothing of it is covered by computing" if covered else ""
    sentence = (
        f"{calls.name} of {figures['bytes'] / 1e6:.3g} MB each{rate}: the exchange itself{nothing}"
    )
    return "exchange-bandwidth", sentence, figures
