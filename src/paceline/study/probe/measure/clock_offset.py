"""Clock offset of each host relative to the first host.

The first host requests each host's time repeatedly and uses the answer with the shortest round
trip, which has the smallest uncertainty.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..participants import ProbeHost

PINGS = 30

# (offset, uncertainty) in seconds
Offset = tuple[float, float]


def offsets(hosts: Sequence[ProbeHost], rank: int, group: Any) -> dict[str, Offset]:
    """Return each host's offset and uncertainty by name; empty except on the first host's leader.

    The leaders of the other hosts answer. ``group`` is the group of all leaders.
    """
    first, *others = hosts
    if rank != first.leader:
        for _ in range(PINGS):
            _answer(first.leader, group)
        return {}
    found = {first.name: (0.0, 0.0)}
    for host in others:
        found[host.name] = min(
            (_ask(host.leader, group) for _ in range(PINGS)), key=lambda one: one[1]
        )
    return found


def _ask(other: int, group: Any) -> Offset:
    theirs = torch.zeros(1, dtype=torch.float64)
    sent = time.time()
    dist.send(theirs, other, group=group)
    dist.recv(theirs, other, group=group)
    back = time.time()
    return float(theirs) - (sent + back) / 2, max(0.0, (back - sent) / 2)


def _answer(first: int, group: Any) -> None:
    mine = torch.zeros(1, dtype=torch.float64)
    dist.recv(mine, first, group=group)
    mine[0] = time.time()
    dist.send(mine, first, group=group)
