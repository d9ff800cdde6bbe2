"""Compute the figures of each axis of a mesh: the process groups along it, taken together."""

from dataclasses import dataclass

from ..records.match_collectives import UNKNOWN_GROUP
from ..records.mesh_places import mesh_places
from .measured_window import MeasuredWindow
from .pop import unblocked_ns
from .process_groups import Group

ALL_RANKS = "all ranks"
OTHER_GROUPS = "other groups"


@dataclass(frozen=True)
class MeshAxis:
    """Figures of one axis. Shares refer to the time of all ranks, so that those of all axes add up.

    Attributes:
        name: The axis, or several ("data x tensor"); groups of all ranks and groups that no axis
            explains are rows of their own.
        extent: Number of ranks of each group; of the largest one, for other groups.
        groups: Number of process groups.
        wait, transfer: Blocked in communication of its groups; wait contains the bubble.
        hidden: Communication in flight while the rank was not blocked (overlap).
        load_balance: sum of b over the members / sum of the largest b of each member's group.
        wait_efficiency: 1 - wait.
        transfer_efficiency: (1 - wait - transfer) / (1 - wait).
        efficiency: wait_efficiency x transfer_efficiency, the share of the time that is left.
        bytes_per_step: Of the whole vectors of all calls, mean over the groups; None without steps.
    """

    name: str
    extent: int
    groups: int
    wait: float
    transfer: float
    hidden: float
    load_balance: float
    wait_efficiency: float
    transfer_efficiency: float
    efficiency: float
    bytes_per_step: float | None


def axis_figures(m: MeasuredWindow, groups: list[Group]) -> list[MeshAxis]:
    """Return the figures of each axis whose groups communicated; [] where "data" is the only one.

    The waits and transfers of all axes add up to those of all ranks.
    """
    if not mesh_places(m.records):
        return []
    count = len(m.records)
    of_axis: dict[str, list[Group]] = {}
    for group in groups:
        is_whole = len(group.ranks) == count > 1 and group.name != UNKNOWN_GROUP
        default = ALL_RANKS if is_whole else OTHER_GROUPS
        of_axis.setdefault(group.axis or default, []).append(group)
    found = [_axis(name, own, m) for name, own in of_axis.items()]
    return sorted(found, key=lambda one: -(one.wait + one.transfer))


def _axis(name: str, groups: list[Group], m: MeasuredWindow) -> MeshAxis:
    count = len(m.records)
    wait, transfer, hidden = (
        sum(getattr(group, what) * len(group.ranks) for group in groups) / count
        for what in ("wait", "transfer", "hidden")
    )
    busy = {r.rank: unblocked_ns(own) for r, own in zip(m.records, m.states, strict=True)}
    times = [[busy[rank] for rank in group.ranks] for group in groups]
    most = sum(max(own) * len(own) for own in times)
    steps = len(m.steps) if m.steps is not None else 0
    sent = sum(one.bytes for group in groups for one in group.collectives)
    free = 1 - wait
    return MeshAxis(
        name=name,
        extent=max(group.size for group in groups),
        groups=len(groups),
        wait=wait,
        transfer=transfer,
        hidden=hidden,
        load_balance=sum(map(sum, times)) / most if most else 1.0,
        wait_efficiency=free,
        transfer_efficiency=(free - transfer) / free if free > 0 else 1.0,
        efficiency=free - transfer,
        bytes_per_step=sent / len(groups) / steps if steps else None,
    )


def axes_add_up(axes: list[MeshAxis], states: list[dict[str, float]]) -> bool:
    """Return whether the axes add up to the blocked time of the ranks."""
    lost = {
        "wait": sum(rank["wait"] + rank["bubble"] for rank in states),
        "transfer": sum(rank["transfer"] for rank in states),
    }
    return not axes or all(
        abs(sum(getattr(one, kind) for one in axes) - ns / len(states)) < 1e-6
        for kind, ns in lost.items()
    )
