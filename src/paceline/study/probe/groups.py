"""Groups of ranks that measure links: ranks of one host, leaders of the hosts, all ranks."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from ...cost.machine.dataclass_tree import to_tree
from .measure.clock_offset import offsets
from .measure.collectives import QUICK, SIZES, Members, collectives
from .measure.link_pairs import pairs
from .participants import Participants

TIMEOUT = 30.0  # seconds after which a collective fails


class Groups:
    """The measurements of links, to be passed to ``Participants.measure``.

    They return lists of cost.machine's dataclasses as plain values.

    Call ``in_host`` and ``all_ranks`` on every rank before the measurements of leaders only:
    PyTorch derives the name of a new group from its ranks and from the number of groups that a
    rank already has, and all members must derive the same name.
    """

    def __init__(self, participants: Participants, seconds: float, quick: bool) -> None:
        self.participants, self.seconds, self.sizes = (
            participants,
            seconds,
            QUICK if quick else SIZES,
        )
        self._made: dict[tuple[int, ...], Members] = {}

    def in_host(self) -> Any:
        """Measure the collectives in this host; with one rank, only create the group."""
        return self._collectives(
            "in host", self.participants.host.ranks, (self.participants.host.name,)
        )

    def between(self) -> Any:
        return self._collectives("between hosts", tuple(self.participants.leaders), self._names())

    def all_ranks(self) -> Any:
        ranks = tuple(rank for host in self.participants.hosts for rank in host.ranks)
        return self._collectives("all", ranks, self._names())

    def pairs(self) -> Any:
        members = self._members(tuple(self.participants.leaders))
        return to_tree(
            pairs(self.participants.hosts, self.participants.rank, members.group, members.device)
        )

    def offsets(self) -> Any:
        members = self._members(tuple(self.participants.leaders))
        return offsets(self.participants.hosts, self.participants.rank, members.group)

    def _names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.participants.hosts)

    def _collectives(self, name: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Any:
        members = self._members(ranks)
        if len(ranks) == 1:
            return []
        found = collectives(members, name, hosts, self.seconds, self.sizes)
        return to_tree(found) if self.participants.rank == ranks[0] else []

    def _members(self, ranks: tuple[int, ...]) -> Members:
        """Return the group. Only its members create it: other hosts may no longer answer."""
        if ranks not in self._made:
            group = dist.new_group(
                list(ranks),
                timeout=datetime.timedelta(seconds=TIMEOUT),
                use_local_synchronization=True,
            )
            gpus = all(host.gpus for host in self.participants.hosts)
            device = torch.device("cuda", torch.cuda.current_device()) if gpus else "cpu"
            self._made[ranks] = Members(group, len(ranks), torch.device(device))
        return self._made[ranks]
