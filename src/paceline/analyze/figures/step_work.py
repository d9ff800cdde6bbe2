"""Count the work of one sampled step (``--count-flops``) and place it on a machine's roofline."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...cost.machine.machine_file import HostFacts, Machine
from ...cost.roofline import Roof, RooflinePoint, place, roofs
from ..records.read_record import Record

MAX_PLACED_OPERATORS = 3  # on the roofline


@dataclass(frozen=True)
class Operator:
    """One kind of operator in the step, all ranks together.

    seconds: Mean over ranks; None on a device that computes asynchronously.
    """

    name: str
    calls: int
    flops: float
    bytes: float
    seconds: float | None


@dataclass(frozen=True)
class StepWork:
    """FLOPs and memory traffic (bytes) of one step, of all ranks that counted it."""

    step: int
    ranks: list[int]
    flops: float
    bytes: float
    device: str  # "cpu", "cuda:0": of the first rank
    precision: str  # of most FLOPs, as the machine file names it
    operators: list[Operator]  # those with most FLOPs first
    uncounted: list[str]  # operators with unknown FLOPs


@dataclass(frozen=True)
class Roofline:
    """Work of one device (a host's cores, or one GPU) on the roofs measured there."""

    host: str  # whose roofs they are
    device: str
    roofs: dict[str, Roof]  # by precision
    points: dict[str, RooflinePoint] = field(default_factory=dict)
    assumed: bool = False  # whether the work's own host is not in the machine file


def sum_work(records: list[Record]) -> StepWork | None:
    """Return the sum of what the ranks counted, or None where none did."""
    counted = [record for record in records if record.meta.get("work")]
    found = [record.meta["work"] for record in counted]
    if not found:
        return None
    return StepWork(
        step=found[0]["step"],
        ranks=[record.rank for record in counted],
        flops=sum(work["flops"] for work in found),
        bytes=sum(work["bytes"] for work in found),
        device=found[0]["device"],
        precision=found[0]["precision"],
        operators=_operators([work["ops"] for work in found], found[0]["device"] == "cpu"),
        uncounted=sorted({name for work in found for name in work["uncounted"]}),
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
    """Compare the sampled step of the first counted device with the limits of its host.

    Returns None where nothing was counted. median_s: Duration of a step. useful: Share of it that
    is computing.

    Raises:
        ValueError: The machine file has no roofs of such a device.
    """
    counted = [record for record in records if record.meta.get("work")]
    if not counted:
        return None
    first = counted[0]
    device = str(first.meta["work"]["device"]) or "cpu"
    on_cpu = device == "cpu"
    together = [r for r in counted if r.host == first.host] if on_cpu else [first]
    host, assumed = _find_host(machine, first.host)
    found = roofs(host, device)
    if not found:
        raise ValueError(
            f"the machine file has no matrix product and triad of {device} on {host.name}. "
            "HINT: paceline check there"
        )
    whole = sum_work(together)
    assert whole is not None
    roof = found.get(whole.precision) or next(iter(found.values()))
    points = {
        name: place(flops, size, seconds, peak=roof.peak, bandwidth=roof.bandwidth)
        for name, flops, size, seconds in _roofline_points(whole, median_s, useful)
        if flops and size and seconds
    }
    return Roofline(host.name, device, found, points, assumed)


def _roofline_points(
    whole: StepWork, median_s: float | None, useful: float | None
) -> Iterator[tuple[str, float, float, float]]:
    """Yield the name, FLOPs, bytes and seconds of each point."""
    if median_s:
        yield "a step", whole.flops, whole.bytes, median_s
        if useful:
            yield "its useful time", whole.flops, whole.bytes, median_s * useful
    for op in whole.operators[:MAX_PLACED_OPERATORS]:
        if op.seconds is not None:
            yield op.name, op.flops, op.bytes, op.seconds


def _find_host(machine: Machine, name: str) -> tuple[HostFacts, bool]:
    """Return the host of that name, or the file's first one; and whether it had to be assumed."""
    short = name.partition(".")[0]
    for host in machine.hosts:
        if host.name.partition(".")[0] == short:
            return host, False
    if not machine.hosts:
        raise ValueError("the machine file has no host. HINT: paceline check")
    return machine.hosts[0], True
