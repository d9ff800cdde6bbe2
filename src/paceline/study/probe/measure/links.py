"""Latency and bandwidth between ranks: of messages between two hosts, and of collectives."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....comm.group_device import all_gather_flat, reduce_scatter_flat
from ....comm.shared_memory_group import SharedMemoryGroup
from ....cost.machine.machine_file import BANDWIDTH, SECONDS, AtSize, Collective, Figure, Pair
from ....record.hooks.collectives import RecordedGroup
from ..participants import ProbeHost
from .device_speed import synchronized

# Latency and bandwidth of the link between each two hosts.
#
# The leaders of two hosts send messages back and forth. Every host is in at most one pair of a
# round, so that disjoint pairs are measured at the same time.

EVERY_PAIR = 32  # maximum number of hosts of which every pair is measured
SOME_ROUNDS = 12  # rounds with more hosts, in addition to neighbors
SMALL, FIRST = 8, 256 << 10
LARGE = (1 << 20, 4 << 20, 16 << 20)
LONG = 0.1  # maximum seconds of one large message
PINGS, LARGE_PINGS = 50, 5

Both = tuple[int, int]


def rounds(count: int) -> list[list[Both]]:
    """Return pairs of the numbers below ``count``, lower first, in rounds of disjoint pairs.

    All pairs are returned up to EVERY_PAIR hosts; with more, a ring and SOME_ROUNDS rounds.
    """
    every = _tournament(count)
    if count <= EVERY_PAIR:
        return every
    ring = [[(i, i + 1) for i in range(first, count - 1, 2)] for first in (0, 1)] + [
        [(0, count - 1)]
    ]
    step = len(every) / SOME_ROUNDS
    some = ring + [every[int(i * step)] for i in range(SOME_ROUNDS)]
    seen: set[Both] = set()
    found = []
    for candidates in some:
        found.append([pair for pair in candidates if pair not in seen])
        seen.update(candidates)
    return found


def _tournament(count: int) -> list[list[Both]]:
    """Return all pairs by the circle method: one position is fixed, the others rotate.

    With an odd count, one host is idle in each round.
    """
    places = list(range(count + count % 2))
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [(min(pair), max(pair)) for pair in opposite]
        found.append([pair for pair in pairs if pair[1] < count])
        places.insert(1, places.pop())
    return found


def apart(pairs: Iterable[Both], machine: Sequence[str]) -> list[list[Both]]:
    """Split the pairs into rounds in which each machine is in at most one pair."""
    found: list[tuple[list[Both], set[str]]] = []
    for pair in pairs:
        own = {machine[pair[0]], machine[pair[1]]}
        for members, busy in found:
            if not own & busy:
                members.append(pair)
                busy |= own
                break
        else:
            found.append(([pair], own))
    return [one for one, _ in found]


def pairs(hosts: Sequence[ProbeHost], rank: int, group: Any, device: torch.device) -> list[Pair]:
    """Measure all pairs of hosts; return those in which the calling leader's host is first.

    Args:
        group: Process group of all leaders.
        device: Device of the messages.
    """
    machine = [host.machine for host in hosts]
    me = [host.leader for host in hosts].index(rank)
    found = []
    for all_pairs in rounds(len(hosts)):
        for disjoint in apart(all_pairs, machine):
            together = torch.zeros(1)
            dist.all_reduce(together, group=group)
            for first, second in disjoint:
                if me in (first, second):
                    pair = _pair(hosts[first], hosts[second], me == first, group, device)
                    found += [pair] if me == first else []
    return found


def _pair(
    first: ProbeHost, second: ProbeHost, begins: bool, group: Any, device: torch.device
) -> Pair:
    """Measure one pair; its bandwidth is that of the slower direction."""
    link = _Link(second.leader if begins else first.leader, begins, group, device)
    try:
        small = [link.forth(SMALL) for _ in range(PINGS + 1)][1:]
        latency = Figure.of([seconds / 2 for seconds in small], SECONDS)
        once = max(link.forth(FIRST), link.back(FIRST))
        size = link.agree_on(max((n for n in LARGE if once * n / FIRST < LONG), default=FIRST))
        forth = [link.forth(size) for _ in range(LARGE_PINGS + 1)][1:]
        back = [link.back(size) for _ in range(LARGE_PINGS + 1)][1:]
    except RuntimeError as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"between {first.name} and {second.name}: {text}") from None
    slower = max(forth, back, key=statistics.median)
    # The time of the large message: the round trip without the small message in return.
    alone = [max(seconds - latency.median, seconds / 2) for seconds in slower]
    rate = Figure.of([size / seconds for seconds in alone], BANDWIDTH)
    return Pair(first.name, second.name, latency, rate)


@dataclass(frozen=True)
class _Link:
    """One end of a pair. Both call the same methods; times are valid on the end that begins."""

    other: int
    begins: bool
    group: Any
    device: torch.device

    def forth(self, size: int) -> float:
        """Return the round-trip seconds of a message of this size and a small reply."""
        return self._to_and_fro(size, SMALL)

    def back(self, size: int) -> float:
        """Return the round-trip seconds of a small message and a reply of this size."""
        return self._to_and_fro(SMALL, size)

    def agree_on(self, number: int) -> int:
        """Return the number of the end that begins, on both ends."""
        tensor = torch.tensor([number])
        self._pass(tensor, send=self.begins)
        return int(tensor)

    def _to_and_fro(self, there: int, back: int) -> float:
        go, come = (
            torch.zeros(size, dtype=torch.uint8, device=self.device) for size in (there, back)
        )
        start = time.perf_counter()
        self._pass(go, send=self.begins)
        self._pass(come, send=not self.begins)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(1e-9, time.perf_counter() - start)

    def _pass(self, tensor: torch.Tensor, send: bool) -> None:
        if send:
            dist.send(tensor, self.other, group=self.group)
        else:
            dist.recv(tensor, self.other, group=self.group)


# Latency and bandwidth of collectives within a group of ranks, by size.
#
# The time of a repetition is the mean over the group's ranks, as in nccl-tests and the OSU
# benchmarks: ranks call the collective repeatedly without a pause, and a rank that arrives early
# waits inside its call. All ranks of a group choose the same number of repetitions and the same
# largest size, because they decide from shared times.

ITEM_BYTES = torch.float32.itemsize
LATENCY = 8  # size in bytes of the vector whose time counts as the latency
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
QUICK = tuple(1 << power for power in range(12, 25, 4))  # 4 KiB to 16 MiB
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
LEAST, MOST = 5, 200  # minimum and maximum number of repetitions


@dataclass(frozen=True)
class Members:
    """A group of ranks that measures together.

    Attributes:
        group: Process group of torch.distributed.
        size: Number of ranks in the group.
        device: Device of the vectors.
    """

    group: Any
    size: int
    device: torch.device

    def share(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all members; must be called by every member."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        found: list[float] = (tensor / self.size).tolist()
        return found


def collectives(
    members: Members, name: str, hosts: tuple[str, ...], seconds: float, sizes: tuple[int, ...]
) -> list[Collective]:
    """Measure every collective within the group.

    Args:
        name: Name of the kind of group; see ``Collective`` in cost.machine.
        hosts: Names of the group's hosts.
        seconds: Approximate time for each collective.
        sizes: Vector sizes in bytes.
    """
    cuda = members.device.type == "cuda"
    found = []
    for operation in OPERATIONS:
        try:
            latency, table = _measured(members, operation, seconds, sizes)
        except RuntimeError as error:
            if "support" not in str(error):
                raise
            continue  # this version of the backend lacks the collective, on all ranks alike
        found.append(
            Collective(
                name,
                operation,
                members.size,
                hosts,
                "nccl" if cuda else backend_of(members.group),
                members.device.type,
                latency,
                tuple(table),
            )
        )
    return found


def backend_of(group: Any) -> str:
    """Return the name of the backend that transfers CPU tensors in a group."""
    inner = group.inner if isinstance(group, RecordedGroup) else group
    return "paceline" if isinstance(inner, SharedMemoryGroup) else "gloo"


def _measured(
    members: Members, operation: str, seconds: float, sizes: tuple[int, ...]
) -> tuple[Figure, list[AtSize]]:
    _, times = _timed(members, operation, LATENCY, seconds / 8)
    latency, left = Figure.of(times, SECONDS), seconds - sum(times)
    table: list[AtSize] = []
    for i, size in enumerate(sizes):
        if _expected(latency, table, size) * (LEAST + 2) > 2 * seconds:
            break
        exact, times = _timed(members, operation, size, left / (len(sizes) - i))
        # With many ranks, the minimum of one element per rank may give two sizes the same bytes.
        if not table or table[-1].bytes < exact:
            table.append(AtSize(exact, Figure.of(times, SECONDS)))
        left -= sum(times)
    return latency, table


def _expected(latency: Figure, table: list[AtSize], size: int) -> float:
    """Return the expected seconds for a larger vector, extrapolated linearly from the last two."""
    if not table:
        return 0.0
    points = [(LATENCY, latency.low), *((entry.bytes, entry.seconds.low) for entry in table)]
    (less, before), (bytes_, seconds) = points[-2:]
    return seconds + (size - bytes_) * max(0.0, seconds - before) / (bytes_ - less)


def _timed(members: Members, operation: str, size: int, seconds: float) -> tuple[int, list[float]]:
    """Return the vector's bytes and the seconds of each repetition, the same on all members."""
    exact, call = prepared(members, operation, size)
    call()
    once = min(members.share([mean_time(call), mean_time(call)]))
    count = min(MOST, max(LEAST, int(seconds / max(once, 1e-7))))
    return exact, members.share([mean_time(call) for _ in range(count)])


def mean_time(call: Callable[[], Any], count: int = 1) -> float:
    """Return the mean seconds per call over ``count`` consecutive calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def prepared(members: Members, operation: str, size: int) -> tuple[int, Callable[[], Any]]:
    """Return the number of bytes of the vector, and a function that calls the collective once.

    The size of a vector is defined in docs/reference/measures.md; for all-gather it is that of all
    parts together. It may differ slightly from ``size`` if that is not divisible by the ranks.
    """
    group = members.group
    count, each = elements(operation, size, members.size)
    whole = torch.zeros(count, device=members.device)
    other = torch.zeros(count, device=members.device)
    part = torch.zeros(each, device=members.device)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather_flat(whole, part, group=group),
        "reduce-scatter": lambda: reduce_scatter_flat(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return count * ITEM_BYTES, synchronized(calls[operation], members.device)


def elements(operation: str, size: int, ranks: int) -> tuple[int, int]:
    """Return the elements of a vector of about ``size`` bytes, and of the part of each rank."""
    each = max(1, size // ITEM_BYTES // ranks)
    return max(1, size // ITEM_BYTES) if operation == "all-reduce" else each * ranks, each
