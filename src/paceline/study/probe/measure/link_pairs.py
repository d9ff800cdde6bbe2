"""Latency and bandwidth of the link between each two hosts.

The leaders of two hosts send messages back and forth. Every host is in at most one pair of a round,
so that disjoint pairs are measured at the same time.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....cost.machine.machine_file import BANDWIDTH, SECONDS, Figure, Pair
from ..participants import ProbeHost

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
    for one in some:
        found.append([pair for pair in one if pair not in seen])
        seen.update(one)
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
        for one, busy in found:
            if not own & busy:
                one.append(pair)
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
        for one in apart(all_pairs, machine):
            together = torch.zeros(1)
            dist.all_reduce(together, group=group)
            for first, second in one:
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
        size = link.told(max((n for n in LARGE if once * n / FIRST < LONG), default=FIRST))
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

    def told(self, number: int) -> int:
        """Return on both ends the number that the beginning end passes."""
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
