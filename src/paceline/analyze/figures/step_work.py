"""What a step computes, as one sampled step was counted (``--count-flops``), and where that stands
on the roofline of a machine file. See docs/reference/measures.md."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...cost.machine.machine_file import HostFacts, Machine
from ...cost.roofline import Placed, Roof, place, roofs
from ..records.read_record import Record

SHOWN = 3  # operators that are placed by themselves


@dataclass(frozen=True)
class Operator:
    """One kind of operator in the step, all ranks together; seconds: the mean rank's in it, None
    where the device computes on while the call returns."""

    name: str
    calls: int
    flops: float
    bytes: float
    seconds: float | None


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of memory traffic of one step, of all ranks that were counted."""

    step: int
    ranks: list[int]
    flops: float
    bytes: float
    device: str  # "cpu", "cuda:0": of the first rank
    precision: str  # of most FLOPs, as the machine file names it
    operators: list[Operator]  # those with most FLOPs first
    uncounted: list[str]  # whose FLOPs nobody knows


@dataclass(frozen=True)
class Roofline:
    """Work of one device (a host's cores, or one GPU) on the roofs that were measured there."""

    host: str  # whose roofs they are
    device: str
    roofs: dict[str, Roof]  # by precision
    points: dict[str, Placed] = field(default_factory=dict)
    assumed: bool = False  # whether the work's own host is not in the machine file


def work(records: list[Record]) -> Work | None:
    """The sum of what the ranks counted; None where none did."""
    counted = [record for record in records if record.meta.get("work")]
    found = [record.meta["work"] for record in counted]
    if not found:
        return None
    return Work(
        step=found[0]["step"],
        ranks=[record.rank for record in counted],
        flops=sum(one["flops"] for one in found),
        bytes=sum(one["bytes"] for one in found),
        device=found[0]["device"],
        precision=found[0]["precision"],
        operators=_operators([one["ops"] for one in found], found[0]["device"] == "cpu"),
        uncounted=sorted({name for one in found for name in one["uncounted"]}),
    )


def _operators(ranks: list[list[list[float]]], timed: bool) -> list[Operator]:
    sums: dict[str, list[float]] = {}
    for name, *figures in (op for ops in ranks for op in ops):
        before = sums.setdefault(str(name), [0.0] * len(figures))
        sums[str(name)] = [a + b for a, b in zip(before, figures, strict=True)]
    found = [
        Operator(name, int(calls), flops, size, seconds / len(ranks) if timed else None)
        for name, (calls, flops, size, seconds) in sums.items()
    ]
    return sorted(found, key=lambda op: (-op.flops, -op.bytes))


def on_roofline(
    records: list[Record], machine: Machine, median_s: float | None, useful: float | None
) -> Roofline | None:
    """A step of the records' first counted device on the roofs of its host; None where nothing
    was counted. median_s: of a step. useful: that share of it is computing.

    Raises ValueError where the machine file has no roofs of such a device.
    """
    counted = [record for record in records if record.meta.get("work")]
    if not counted:
        return None
    first = counted[0]
    device = str(first.meta["work"]["device"]) or "cpu"
    on_cpu = device == "cpu"
    together = [r for r in counted if r.host == first.host] if on_cpu else [first]
    host, assumed = _host(machine, first.host)
    found = roofs(host, device)
    if not found:
        raise ValueError(
            f"the machine file has no matrix product and triad of {device} on {host.name}. "
            "HINT: paceline check there"
        )
    whole = work(together)
    assert whole is not None
    roof = found.get(whole.precision) or next(iter(found.values()))
    points = {
        name: place(flops, size, seconds, peak=roof.peak, bandwidth=roof.bandwidth)
        for name, flops, size, seconds in _pieces(whole, median_s, useful)
        if flops and size and seconds
    }
    return Roofline(host.name, device, found, points, assumed)


def _pieces(
    whole: Work, median_s: float | None, useful: float | None
) -> Iterator[tuple[str, float, float, float]]:
    """Name, FLOPs, bytes and seconds."""
    if median_s:
        yield "a step", whole.flops, whole.bytes, median_s
        if useful:
            yield "its useful time", whole.flops, whole.bytes, median_s * useful
    for op in whole.operators[:SHOWN]:
        if op.seconds is not None:
            yield op.name, op.flops, op.bytes, op.seconds


def _host(machine: Machine, name: str) -> tuple[HostFacts, bool]:
    """The host of that name, or the file's first for hosts of its kind."""
    short = name.partition(".")[0]
    for host in machine.hosts:
        if host.name.partition(".")[0] == short:
            return host, False
    if not machine.hosts:
        raise ValueError("the machine file has no host. HINT: paceline check")
    return machine.hosts[0], True
