"""Named figures of a machine, for the comparison of hosts, links and machines."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from ...plurals import counted
from .machine_file import Collective, Figure, HostFacts, Machine
from .units import size

_NORMAL = 1.349  # distance of the quartiles of a normal distribution, in standard deviations
_NEARER = 1.35  # over n: share by which the quartiles of n repetitions are nearer to each other
_FEW = 3  # repetitions; with fewer the spread is unknown ...
_GUESSED = 0.05  # ... and is assumed to be at least this share of the median


@dataclass(frozen=True)
class NamedFigure:
    """Figure with its name and owner.

    Attributes:
        what: Name of the measured quantity.
        hosts: One host, or the two ends of a link.
        device: "cpu" or "cuda:3"; empty for a host or a link.
        like: Only figures with the same value are compared with each other.
        figure: Measured value.
        more_is_better: Whether a larger value is better.
        worth: Smallest relevant relative difference.
    """

    what: str
    hosts: tuple[str, ...]
    device: str
    like: str
    figure: Figure
    more_is_better: bool
    worth: float

    @property
    def member(self) -> str:
        """Host, link or device that the figure belongs to, for messages."""
        ends = " - ".join(self.hosts)
        return f"{ends} {self.device}" if ":" in self.device else ends


def deviation(figure: Figure) -> float:
    """Return the standard deviation of one repetition, estimated from the quartiles."""
    if figure.n < _FEW:
        return max(figure.spread, _GUESSED * figure.median)
    return figure.spread / (_NORMAL * (1 - _NEARER / figure.n))


def typical_deviation(figures: list[Figure]) -> float:
    """Return the median deviation of figures of one kind.

    The deviation of a single figure with few repetitions may be small by chance.
    """
    return median(deviation(figure) for figure in figures)


def host_figures(machine: Machine) -> list[NamedFigure]:
    """Return the figures of each host.

    These are arithmetic, memory, storage, collectives within the host, and the import of torch.
    """
    found = [named for host in machine.hosts for named in _of_host(host)]
    names = {host.name: host for host in machine.hosts}
    for collective in machine.collectives:
        if collective.group == "in host" and len(collective.hosts) == 1:
            host = names.get(collective.hosts[0])
            found += _of_collective(collective, host) if host is not None else []
    return found


def _of_host(host: HostFacts) -> Iterator[NamedFigure]:
    name = (host.name,)
    for arithmetic in host.arithmetic:
        what = f"{arithmetic.precision} {arithmetic.operation}"
        like = host.hardware(arithmetic.device)
        yield NamedFigure(what, name, arithmetic.device, like, arithmetic.rate, True, 0.03)
    for triad in host.memory:
        what = "memory bandwidth"
        like = host.hardware(triad.device)
        yield NamedFigure(what, name, triad.device, like, triad.triad, True, 0.03)
    for folder in host.storage:
        for does, figure in (
            ("reading", folder.read),
            ("writing", folder.write),
            ("creating small files", folder.small_create),
            ("reading small files", folder.small_read),
        ):
            if figure is not None:
                yield NamedFigure(f"{does} in {folder.folder}", name, "", "", figure, True, 0.1)
    if host.import_torch is not None:
        yield NamedFigure("import torch", name, "", "", host.import_torch, False, 0.1)


def _of_collective(collective: Collective, host: HostFacts | None = None) -> Iterator[NamedFigure]:
    """Yield the latency, and the bandwidth at the largest size."""
    device = collective.device.partition(":")[0]
    what = f"{collective.operation} ({collective.backend or device})"
    where = {"in host": "in the host", "all": "over all ranks"}.get(
        collective.group, collective.group
    )
    like = counted(collective.ranks, "rank")
    like += f", {host.hardware(collective.device)}" if host is not None else ""
    hosts = collective.hosts[:1] if host is not None else ()
    if collective.latency is not None:
        latency = f"latency of {what} {where}"
        yield NamedFigure(latency, hosts, device, like, collective.latency, False, 0.25)
    largest = max(collective.sizes, key=lambda entry: entry.bytes, default=None)
    rate = largest.algbw if largest is not None else None
    if largest is not None and rate is not None:
        name = f"bandwidth of {what} {where}, {size(largest.bytes)}"
        yield NamedFigure(name, hosts, device, like, rate, True, 0.1)


def group_figures(machine: Machine) -> list[NamedFigure]:
    """Return the figures of collectives over several hosts."""
    return [
        named
        for collective in machine.collectives
        if collective.group != "in host" or len(collective.hosts) != 1
        for named in _of_collective(collective)
    ]


def link_figures(machine: Machine) -> list[NamedFigure]:
    """Return the bandwidth and latency of each pair of hosts."""
    found = []
    for pair in machine.pairs:
        ends = (pair.first, pair.second)
        if pair.bandwidth is not None:
            found.append(NamedFigure("bandwidth", ends, "", "", pair.bandwidth, True, 0.1))
        if pair.latency is not None:
            found.append(NamedFigure("latency", ends, "", "", pair.latency, False, 0.25))
    return found
