"""What is known of a rehearsed job, and of each rank that ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Members = tuple[int, ...]
REHEARSED_STEPS = 2
MEASURED_STEP = 1  # the second one: the first also creates groups, states and buckets
ALL_RANKS, DATA = "all ranks", "data"


@dataclass(frozen=True)
class Call:
    """A collective, a send or a receive of a rehearsed rank.

    Attributes:
        step: Number of completed optimizer steps.
        group: Number of its group in the order of creation on this rank.
        op: ``record.ring.states.Op``.
        bytes: Of the whole vector, as in a record.
        peer: Root, or the other rank of a message, in the group; -1 for others.
        line: The script's line, such as "train.py:31".
    """

    step: int
    group: int
    op: int
    bytes: int
    peer: int
    line: str


@dataclass(frozen=True)
class GroupFacts:
    """A process group. axis: The axis along which its ranks differ. members: Global ranks."""

    name: str
    axis: str
    members: Members


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of a rank: of what its optimizers train, and of its process at the peak."""

    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    process_peak: int = 0


@dataclass(frozen=True)
class Failure:
    """An exception of a rank.

    Attributes:
        text: Its type and the first line of its text.
        line: The script's line, such as "train.py:31"; "" if unknown.
        is_limit: Whether the rehearsal can't run what the ranks of the job could.
    """

    text: str
    line: str = ""
    is_limit: bool = False


@dataclass(frozen=True)
class RankFacts:
    """What one rank did.

    Attributes:
        axes: Extent of each axis of the mesh, outermost first; empty without ``world.distribute``.
        layout: Layout of its models; "" without.
        steps: Completed optimizer steps.
        samples: Of this rank in the measured step.
        has_unknown: Whether it got values in place of those that another rank would have sent.
    """

    rank: int
    axes: list[tuple[str, int]] = field(default_factory=list)
    layout: str = ""
    groups: list[GroupFacts] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    steps: int = 0
    samples: int = 0
    memory: MemoryFacts = field(default_factory=MemoryFacts)
    failure: Failure | None = None
    has_unknown: bool = False
    seconds: float = 0.0

    @property
    def measured_calls(self) -> list[Call]:
        """The calls of the measured step."""
        return [call for call in self.calls if call.step == MEASURED_STEP]

    @property
    def place(self) -> dict[str, int]:
        """The position along each axis."""
        return place_of(self.rank, self.axes)


@dataclass(frozen=True)
class HostFacts:
    """A host of the job.

    Attributes:
        ranks: Its number of ranks.
        places: Of each local rank, where on the host it is: "socket 0, GPU 1"; empty if unknown.
    """

    name: str
    ranks: int
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RehearsalRequest:
    """What is to be rehearsed.

    Attributes:
        hosts: The hosts; ranks of a host follow each other.
        shows_layout: Whether the placement is printed (``--show-layout``).
        names_gpus: Whether the script names devices "cuda".
    """

    hosts: list[HostFacts]
    shows_layout: bool = False
    names_gpus: bool = False

    @property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    @property
    def host_of_rank(self) -> list[str]:
        return [host.name for host in self.hosts for _ in range(host.ranks)]


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsed job. ranks: The ranks that ran, in the order in which they ran."""

    request: RehearsalRequest
    ranks: list[RankFacts]

    @property
    def axes(self) -> list[tuple[str, int]]:
        return next((rank.axes for rank in self.ranks if rank.axes), [])

    @property
    def failed(self) -> RankFacts | None:
        return next((rank for rank in self.ranks if rank.failure is not None), None)


def place_of(rank: int, axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the position of a rank along each axis; ranks along the last axis are neighbours."""
    place: dict[str, int] = {}
    for axis, extent in reversed(axes):
        rank, place[axis] = divmod(rank, extent)
    return {axis: place[axis] for axis, _ in axes}


def rank_at(place: Mapping[str, int], axes: Sequence[tuple[str, int]]) -> int:
    """Return the rank at a position."""
    rank = 0
    for axis, extent in axes:
        rank = rank * extent + place[axis]
    return rank


def groups_along(axis: str, axes: Sequence[tuple[str, int]]) -> list[Members]:
    """Return the groups of ranks that differ along one axis only, by their first rank."""
    extents = dict(axes)
    size = 1
    for extent in extents.values():
        size *= extent
    found = []
    for rank in range(size):
        place = place_of(rank, axes)
        if place[axis] == 0:
            found.append(tuple(rank_at({**place, axis: i}, axes) for i in range(extents[axis])))
    return found


# Which ranks of a job are rehearsed: those that may differ in shapes, memory or calls.

MAX_ALL = 4  # ranks of a job that are all rehearsed
STAGE = "stage"


def representatives(size: int, axes: Sequence[tuple[str, int]]) -> list[int]:
    """Return ranks of a job in their order.

    With a mesh: of each stage the first rank; along each other axis the second one (which has
    neighbours on both sides, where there are three or more) and the last one; the last rank of all.
    Without a mesh: the first two ranks, the middle one and the last one.

    Args:
        size: Number of ranks.
        axes: Extents of the mesh; empty if it is not known.
    """
    if size <= MAX_ALL:
        return list(range(size))
    if not axes:
        return sorted({0, 1, size // 2, size - 1})
    origin = place_of(0, axes)
    found = [0]
    for axis, extent in axes:
        positions = range(extent) if axis == STAGE else sorted({min(1, extent - 1), extent - 1})
        found += [rank_at({**origin, axis: at}, axes) for at in positions]
    found.append(size - 1)
    return sorted(set(found))
