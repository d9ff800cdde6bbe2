"""Which ranks of a group share a host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """ranks: of each host, in their order; hosts in that of their first rank, those of a rack next
    to each other. names: what hosts are called. rank: this one. most: so many ranks of a host are
    enough for its links. in_rack: hosts of each rack; 0 where racks are not known, or differ."""

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    rank: int
    most: int
    in_rack: int = 0

    @property
    def host(self) -> int:
        return next(at for at, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def local(self) -> int:
        """Of this rank, among those of its host."""
        return self.ranks[self.host].index(self.rank)

    @property
    def wired(self) -> int:
        """So many ranks of every host are connected with their like on the others."""
        return min(map(len, self.ranks))

    @property
    def rails(self) -> int:
        """So many of these have a part of what all hosts sum up."""
        return min(self.most, self.wired)

    @property
    def even(self) -> bool:
        """Whether all hosts have as many ranks."""
        return len({len(ranks) for ranks in self.ranks}) == 1


def places(
    identities: Sequence[str], names: Sequence[str], rank: int, most: int, racks: Sequence[str] = ()
) -> Places:
    """identities: of each rank's host, the same where memory can be shared. racks: of each rank."""
    hosts: dict[str, list[int]] = {}
    for at, one in enumerate(identities):
        hosts.setdefault(one, []).append(at)
    members: dict[str, list[tuple[int, ...]]] = {}
    for ranks in hosts.values():
        members.setdefault(racks[ranks[0]] if racks else "", []).append(tuple(ranks))
    found = tuple(ranks for rack in members.values() for ranks in rack)
    sizes = {len(rack) for rack in members.values()}
    alike = "" not in members and len(sizes) == 1 and sizes != {1} and len(members) > 1
    each = sizes.pop() if alike else 0
    return Places(found, tuple(names[ranks[0]] for ranks in found), rank, most, each)
