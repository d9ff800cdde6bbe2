"""What the groups of each axis exchange in a step of a rehearsed job."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ...cost.collectives import collective_terms
from ...record.ring.states import Op
from ..figures.losses import collective_name
from .facts import ALL_RANKS, DATA, GroupFacts, Members, RankFacts, Rehearsal, groups_along


@dataclass(frozen=True)
class AxisTraffic:
    """One kind of collective along an axis, in the measured step.

    Attributes:
        axis: The axis; for groups outside of the mesh their name.
        size: Number of ranks of a group.
        collective: Its name, such as "all-reduce".
        calls: Of the rank that calls most.
        bytes: Of that rank; of the whole vectors, as in a record.
        sent: Bytes that this rank sends; by a ring in collectives that have one.
        ranks: The ranks with these numbers, of those that ran.
        others: Bytes of the other ones that call it, by rank.
    """

    axis: str
    size: int
    collective: str
    calls: int
    bytes: int
    sent: int
    ranks: list[int]
    others: dict[int, int]


@dataclass(frozen=True)
class AxisLinks:
    """Groups of an axis, and how many of them have ranks on several hosts."""

    axis: str
    groups: int
    size: int
    crossing: int
    first_crossing: Members


def rank_traffic(of: RankFacts) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Return calls and bytes of a rank in the measured step, by axis, group size and operation."""
    found: dict[tuple[str, int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for call in of.measured_calls:
        group = of.groups[call.group]
        key = (group.axis, len(group.members), call.op)
        calls, amount = found[key]
        found[key] = calls + 1, amount + call.bytes
    return dict(found)


def axis_traffic(ranks: Sequence[RankFacts]) -> list[AxisTraffic]:
    """Return what each axis exchanges in the measured step."""
    every = {rank.rank: rank_traffic(rank) for rank in ranks}
    keys = dict.fromkeys(key for found in every.values() for key in found)
    result = []
    for axis, size, op in keys:
        own = {r: found[axis, size, op] for r, found in every.items() if (axis, size, op) in found}
        calls, amount = max(own.values(), key=lambda one: (one[1], one[0]))
        most = [rank for rank, one in own.items() if one == (calls, amount)]
        others = {rank: one[1] for rank, one in own.items() if rank not in most}
        name = collective_name(op)
        sent = 0 if op == Op.RECV else round(collective_terms(name, size).vectors * amount)
        result.append(AxisTraffic(axis, size, name, calls, amount, sent, most, others))
    return result


def axis_links(rehearsal: Rehearsal) -> list[AxisLinks]:
    """Return for each axis how many of its groups have ranks on several hosts."""
    hosts = rehearsal.request.host_of_rank
    found = []
    for axis, groups in _groups(rehearsal).items():
        crossing = [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]
        first = crossing[0] if crossing else ()
        found.append(AxisLinks(axis, len(groups), len(groups[0]), len(crossing), first))
    return found


def _groups(rehearsal: Rehearsal) -> dict[str, list[Members]]:
    """Return the groups by axis: of the whole mesh; others of the ranks that ran."""
    axes = rehearsal.axes
    found = {axis: groups_along(axis, axes) for axis, extent in axes if extent > 1}
    for rank in rehearsal.ranks:
        for group in rank.groups:
            if group.axis not in dict(axes) and len(group.members) > 1:
                known = found.setdefault(group.axis, [])
                known += [group.members] if group.members not in known else []
    return found


def axis_name(name: str, members: Members, size: int, labels: dict[str, str], desc: str) -> str:
    """Return the name of the axis of a group.

    Args:
        labels: Of the mesh of ``world.distribute``, by name of the group: "tensor (data 0)".
        desc: PyTorch's description: "mesh_dp" of an axis of a DeviceMesh.
    """
    if name in labels:
        return labels[name].partition(" (")[0]
    if len(members) == size:
        return DATA if labels.get("") == DATA else ALL_RANKS
    if desc.startswith("mesh_"):
        return desc.removeprefix("mesh_")
    return "other groups"


def groups_of(
    named: Sequence[tuple[str, Members]], size: int, labels: dict[str, str], descs: dict[str, str]
) -> list[GroupFacts]:
    """Return the groups of a rank with the names of their axes."""
    return [
        GroupFacts(name, axis_name(name, members, size, labels, descs.get(name, "")), members)
        for name, members in named
    ]
