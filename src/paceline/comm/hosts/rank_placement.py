"""Which ranks of a group share a host."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlacement:
    """The hosts of a group's ranks.

    Attributes:
        ranks_by_host: Ranks of each host in ascending order. Hosts are in the order of their first
            rank, those of a rack next to each other.
        host_names: Name of each host.
        rank: This rank.
        max_rails: Number of ranks of a host that suffice to saturate its links.
        hosts_per_rack: Number of hosts of each rack; 0 where racks are unknown or differ in size.
    """

    ranks_by_host: tuple[tuple[int, ...], ...]
    host_names: tuple[str, ...]
    rank: int
    max_rails: int
    hosts_per_rack: int = 0

    @property
    def host_index(self) -> int:
        return next(index for index, ranks in enumerate(self.ranks_by_host) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Index of this rank among those of its host."""
        return self.ranks_by_host[self.host_index].index(self.rank)

    @property
    def num_connected(self) -> int:
        """Number of ranks of every host that are connected to their peers on the other hosts."""
        return min(map(len, self.ranks_by_host))

    @property
    def num_rails(self) -> int:
        """Number of ranks of every host that exchange a part of an all-reduce with other hosts."""
        return min(self.max_rails, self.num_connected)

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({len(ranks) for ranks in self.ranks_by_host}) == 1


def place_ranks(
    identities: Sequence[str],
    names: Sequence[str],
    rank: int,
    max_rails: int,
    racks: Sequence[str] = (),
) -> RankPlacement:
    """Return the placement of a group's ranks.

    identities: of each rank's host, equal where ranks can share memory. names: of each rank's host.
    racks: of each rank.
    """
    hosts: dict[str, list[int]] = {}
    for other_rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(other_rank)
    hosts_by_rack: dict[str, list[tuple[int, ...]]] = {}
    for ranks in hosts.values():
        hosts_by_rack.setdefault(racks[ranks[0]] if racks else "", []).append(tuple(ranks))
    ranks_by_host = tuple(ranks for rack in hosts_by_rack.values() for ranks in rack)
    rack_sizes = {len(rack) for rack in hosts_by_rack.values()}
    racks_are_equal = (
        "" not in hosts_by_rack
        and len(rack_sizes) == 1
        and rack_sizes != {1}
        and len(hosts_by_rack) > 1
    )
    hosts_per_rack = rack_sizes.pop() if racks_are_equal else 0
    return RankPlacement(
        ranks_by_host,
        tuple(names[ranks[0]] for ranks in ranks_by_host),
        rank,
        max_rails,
        hosts_per_rack,
    )
