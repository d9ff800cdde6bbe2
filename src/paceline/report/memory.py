"""Sentences about memory: its peak, and memory that grows."""

from ..analyze.figures.memory import HOST, MemoryGrowth
from ..analyze.figures.report import Report
from ..plurals import named_ranks
from .numbers import duration, size

MAX_TOLD = 3


def memory_warnings(report: Report) -> list[str]:
    """Return a sentence for each growth that is warned about: by kind of memory and node."""
    groups: dict[tuple[str, str], list[MemoryGrowth]] = {}
    for one in report.memory:
        if one.warned:
            groups.setdefault((one.kind, one.host), []).append(one)
    return [memory_sentence(group) for group in list(groups.values())[:MAX_TOLD]]


def peak_sentence(report: Report) -> str | None:
    """Return the largest memory of a rank and its parts; None without a model of the world."""
    if not report.peaks:
        return None
    peak = report.peaks[0]
    names = ("parameters", "buffers", "gradients", "optimizer_states", "rest")
    parts = [f"{name.replace('_', ' ')} {size(n)}" for name in names if (n := getattr(peak, name))]
    of = f"rank {peak.rank} ({peak.host})" if report.size > 1 else "the rank"
    host = f"; {size(peak.offloaded)} offloaded to the host" if peak.offloaded else ""
    predicted = f"; predicted: {size(peak.predicted)}" if peak.predicted is not None else ""
    return (
        f"largest {peak.kind} memory, of {of} with layout {peak.layout}: {size(peak.bytes)} "
        f"({', '.join(parts)}){host}{predicted}"
    )


def first_end(report: Report) -> list[MemoryGrowth]:
    """Return the growth that ends the job first, of all ranks that share this memory; or none."""
    first = next((one for one in report.memory if one.ends_job), None)
    if first is None:
        return []
    same = (first.kind, first.host)
    return [one for one in report.memory if (one.kind, one.host) == same]


def memory_sentence(group: list[MemoryGrowth]) -> str:
    """Return how fast the memory of these ranks grows, and when it ends the job; no full stop."""
    most = max(group, key=lambda one: one.rate)
    ranks = named_ranks(sorted({one.rank for one in group}))
    grows = "grows by" if len(group) == 1 else "grows by at most"
    text = f"the {most.kind} memory of {ranks} ({most.host}) {grows} {_rate(most)}"
    hours = min((one.hours_left for one in group if one.hours_left is not None), default=None)
    if hours is None:
        return text
    left = "the node" if most.kind == HOST else "the device"
    return f"{text}: {left} has none left in {duration(3600 * hours)} if this continues"


def _rate(one: MemoryGrowth) -> str:
    low, high = (size(3600 * max(x, 0.0)) for x in (one.low, one.high))
    each = f", {size(one.per_step)} per step" if one.per_step else ""
    return f"{size(3600 * one.rate)} per hour ({low} to {high}){each}"
