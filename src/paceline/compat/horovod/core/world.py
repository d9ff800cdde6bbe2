"""Horovod's world on this rank: ranks, nodes and process sets, from ``init`` to ``shutdown``."""

import atexit
import contextlib
import itertools
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ....cluster.rank_identity import RankIdentity, rank_identity
from ....comm.backend import MAX_TIMEOUT
from ....comm.backend import NAME as BACKEND
from ....comm.members.exchange_objects import all_gather_objects
from ....comm.shared.memory import sharing_domain
from ....comm.tune.choice import FusionSettings
from ....record.ring.recorder import Recorder, update_all_headers
from ....world.process_group import attempt_store, join_process_group, leave_process_group
from .. import timeline, tuning
from ..environment import HorovodSettings, report_unused, settings
from . import adasum
from .coordinator import LEAVE_TIMEOUT_S, MIN_LEAVE_TIMEOUT_S, Coordinator, agreement
from .errors import NOT_INITIALIZED, HorovodInternalError
from .exchange import Exchange, GroupMeetings
from .execute import Executor
from .negotiation import Fusion
from .notices import Notices
from .process_sets import ProcessSet, global_process_set

START_TIMEOUT_S = 1800.0  # for ranks that start late, and of torch's own collectives


@dataclass(frozen=True)
class Place:
    """Where a rank runs, as all ranks know it."""

    host: str
    local_rank: int
    local_size: int | None
    settings: tuple[int, bool, int] = (0, False, 0)  # that all ranks must share; rank 0's are used


@dataclass
class SetOfRanks:
    """A registered process set.

    Attributes:
        coordinator: Of this rank; None if the rank is not in the set.
        users: The script's objects for it.
    """

    ranks: list[int]
    coordinator: Coordinator | None
    exchange: Exchange | None
    group: Any
    users: list[ProcessSet] = field(default_factory=list)


class HorovodWorld:
    """The ranks and process sets between ``init`` and ``shutdown``.

    Attributes:
        unnamed: Number of operations without a name, by process set and kind.
        device: GPU of the first exchanged tensor on one; all others must be on the same.
    """

    def __init__(self, identity: RankIdentity, settings: HorovodSettings) -> None:
        self.settings = settings
        self._start = next(_starts)
        self.rank = dist.get_rank() if dist.is_initialized() else identity.rank
        self.size = dist.get_world_size() if dist.is_initialized() else identity.size
        self._set_places(identity)
        self.sets: dict[int, SetOfRanks] = {}
        self.unnamed: Counter[tuple[int | None, str]] = Counter()
        self.device: Any = None
        self._next_set = 0
        self.create_set(list(range(self.size)), global_process_set)

    def _set_places(self, identity: RankIdentity) -> None:
        shared = ("fusion_bytes", "fuses_groups", "cache_capacity")
        values: Any = tuple(getattr(self.settings, name) for name in shared)
        own = Place(sharing_domain(), identity.local_rank, identity.local_size, values)
        places = all_gather_objects(own, Place) if self.size > 1 else [own]
        first: Any = dict(zip(shared, places[0].settings, strict=True))
        self.settings = replace(self.settings, **first)
        hosts = [place.host for place in places]
        self.hosts = len(set(hosts))
        same = [rank for rank, host in enumerate(hosts) if host == own.host]
        by_launcher = all(place.local_size is not None for place in places)
        self.local_size = own.local_size if by_launcher and own.local_size else len(same)
        self.local_rank = own.local_rank if by_launcher else same.index(self.rank)
        sizes = {hosts.count(host) for host in hosts}
        self.is_homogeneous = len(sizes) == 1
        local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        if by_launcher:
            local_ranks = [place.local_rank for place in places]
        peers = [rank for rank, number in enumerate(local_ranks) if number == self.local_rank]
        self.cross_rank, self.cross_size = peers.index(self.rank), len(peers)

    def create_set(self, ranks: list[int], user: ProcessSet) -> int:
        """Register a process set on all ranks. Collective over all ranks."""
        number, self._next_set = self._next_set, self._next_set + 1
        group = None
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=MAX_TIMEOUT, backend=BACKEND)
        coordinator = exchange = None
        if self.rank in ranks:
            index = ranks.index(self.rank)
            exchange = Exchange(group, index, ranks)
            executor = Executor(exchange, self.settings.fusion_bytes, self.settings.fuses_groups)
            notices = Notices(self._store_of_set(number), self.rank, ranks)
            meetings = GroupMeetings(group)
            coordinator = Coordinator(index, ranks, meetings, executor, self.settings, notices)
        self.sets[number] = SetOfRanks(ranks, coordinator, exchange, group, [user])
        user._register(number, ranks, self.rank)
        return number

    def _store_of_set(self, number: int) -> Any:
        store = attempt_store()
        return store and PrefixStore(f"horovod/{self._start}/{number}", store)

    def conditions(self) -> dict[str, Any]:
        """Return the conditions under which tuned settings are valid."""
        return {
            "horovod": True,
            "ranks": self.size,
            "hosts": self.hosts,
            "machine": platform.machine(),
            "cores": os.cpu_count() or 0,
            "torch": version("torch"),
        }

    def change(self, settings: FusionSettings) -> None:
        """Let all ranks exchange with other settings in the global process set. On rank 0."""
        coordinator = self.sets[0].coordinator
        assert coordinator is not None
        fusion_bytes = round(settings.mib * 2**20)
        coordinator.change(Fusion(fusion_bytes, settings.cycle_ms / 1e3))

    def find_set(self, ranks: Sequence[int]) -> int | None:
        return next((n for n, one in self.sets.items() if one.ranks == list(ranks)), None)

    def remove_set(self, number: int) -> None:
        removed = self.sets.pop(number)
        for user in removed.users:
            user._invalidate()
        if removed.coordinator is not None and removed.coordinator.close():
            _destroy(removed.group)

    def forget_unnamed(self, number: int) -> None:
        """Number the operations without a name of a process set from 1 again.

        Ranks that joined early have called fewer of them.
        """
        for counted in [one for one in self.unnamed if one[0] == number]:
            del self.unnamed[counted]

    def coordinator_of(self, process_set: ProcessSet) -> Coordinator:
        """Return the coordinator of a process set.

        Raises:
            ValueError: The set is not registered, or this rank is not in it.
        """
        found = self.sets.get(
            -1 if process_set.process_set_id is None else process_set.process_set_id
        )
        if found is None:
            raise ValueError(
                f"{process_set} is not registered: it was removed, or never added. HINT: "
                "hvd.init(process_sets=[...]) or hvd.add_process_set([0, 1])"
            )
        if found.coordinator is None:
            raise ValueError(
                f"rank {self.rank} is not in process set {process_set.process_set_id} (ranks "
                f"{found.ranks}) and can't call its collectives. HINT: if process_set.included()"
            )
        return found.coordinator

    def close(self, frees_groups: bool) -> None:
        """Leave all process sets.

        Args:
            frees_groups: Whether to destroy their process groups; otherwise the caller does.
        """
        if getattr(sys, "last_value", None) is None:  # no uncaught exception
            deadline = time.monotonic() + LEAVE_TIMEOUT_S
            for one in list(self.sets.values()):
                if one.coordinator is None:
                    continue
                left_s = max(deadline - time.monotonic(), MIN_LEAVE_TIMEOUT_S)
                if one.coordinator.close(left_s) and frees_groups:
                    _destroy(one.group)
        for one in self.sets.values():
            for user in one.users:
                if user is global_process_set:
                    user._register(0, [], -1)
                else:
                    user._invalidate()
        self.sets.clear()


def _destroy(group: Any) -> None:
    if group is not None:
        with contextlib.suppress(ValueError):  # the script has destroyed all groups
            dist.destroy_process_group(group)


_starts = itertools.count(1)  # calls of init, the same on all ranks
_world: HorovodWorld | None = None
_owns_group = False  # whether init has created the default group


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initialize this rank; without a launcher, a world of one rank. Collective.

    A process group that the script has initialized is used; otherwise the default group of
    torch.distributed is created with the backend "paceline".

    Args:
        comm: None, or all ranks in ascending order.
        process_sets: Process sets to create, the same on all ranks, or "dynamic".

    Raises:
        ValueError: Another value of ``comm``, an invalid process set, or variables of the
            environment that contradict each other.
    """
    global _world, _owns_group
    if _world is not None:
        return
    values = settings()
    identity = rank_identity(dict(os.environ))
    was_initialized = dist.is_initialized()
    recorder = Recorder(identity.rank, identity.size, enabled=False)
    join_process_group(identity, recorder, START_TIMEOUT_S)
    _owns_group = _owns_group or (dist.is_initialized() and not was_initialized)
    size = dist.get_world_size() if dist.is_initialized() else identity.size
    ranks = list(comm) if isinstance(comm, Iterable) else []
    if comm is not None and ranks != list(range(size)):
        raise ValueError(
            f"hvd.init: comm={comm!r} is not supported: only a list of all {size} ranks in "
            "ascending order. HINT: hvd.init(process_sets=[hvd.ProcessSet([0, 1])])"
        )
    world = HorovodWorld(identity, values)
    _world = world
    update_all_headers(horovod="paceline")
    if world.rank == 0:
        report_unused()
        if values.timeline:
            timeline.start_timeline(values.timeline, values.timeline_cycles)
        if tuning.is_requested(values):
            tuning.begin(world.settings, world.conditions(), world.change)
    try:
        for one in () if process_sets in (None, "dynamic") else process_sets:
            add_process_set(one)
    except Exception:
        shutdown()
        raise
    atexit.unregister(_leave)
    atexit.register(_leave)


def shutdown() -> None:
    """Leave the world; unfinished operations of the other ranks fail. ``init`` may follow."""
    _shutdown(frees_groups=True)


def _shutdown(frees_groups: bool) -> None:
    global _world
    if _world is not None:
        world, _world = _world, None
        tuning.end()
        world.close(frees_groups)
        timeline.stop_timeline()


def _leave() -> None:
    """Shut down at the interpreter's exit, and destroy the group if ``init`` has created it."""
    failed = getattr(sys, "last_value", None) is not None
    _shutdown(frees_groups=False)
    if _owns_group:
        leave_process_group(failed)


def is_initialized() -> bool:
    return _world is not None


def world_of_operations() -> HorovodWorld:
    """Return the world, for an operation. Raises HorovodInternalError before ``init``."""
    if _world is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _world


def current_world() -> HorovodWorld:
    """Return the world.

    Raises:
        ValueError: Before ``init`` and after ``shutdown``.
    """
    if _world is None:
        raise ValueError(NOT_INITIALIZED)
    return _world


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Create a process set after ``init``. Collective over all ranks.

    Args:
        process_set: A ProcessSet, or a list of ranks.

    Raises:
        ValueError: A rank does not exist, or there is a set of the same ranks.
        HorovodInternalError: Ranks pass different sets.
    """
    world = current_world()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = list(process_set.ranks or ())
    outside = [rank for rank in ranks if not 0 <= rank < world.size]
    if outside or not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"hvd.add_process_set: ranks {ranks} of a world of {world.size} ranks. HINT: list "
            f"different ranks from 0 to {world.size - 1}"
        )
    _agree("add_process_set", f"ranks {ranks}")
    if (number := world.find_set(ranks)) is not None:
        raise ValueError(
            f"hvd.add_process_set: process set {number} has the same ranks {ranks}. HINT: use "
            + ("hvd.global_process_set" if number == 0 else "the object that was added first")
        )
    world.create_set(ranks, process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it was removed. Collective over all ranks.

    The global process set, and one that is not registered, are not removed.
    """
    world = current_world()
    number = process_set.process_set_id
    if number == 0 or number not in world.sets:
        return False
    assert number is not None
    _agree("remove_process_set", f"process set {number}")
    world.remove_set(number)
    return True


def _agree(name: str, detail: str) -> None:
    operation = agreement(name, detail)
    coordinator = world_of_operations().coordinator_of(global_process_set)
    coordinator.submit([operation], waits=True)
    coordinator.wait([operation])


def process_set_by_id(number: int) -> ProcessSet:
    """Return a registered process set.

    Raises:
        ValueError: There is none of this number.
    """
    sets = current_world().sets
    if number not in sets:
        raise ValueError(f"there is no process set {number}; registered are {sorted(sets)}")
    return sets[number].users[0]


def process_sets() -> list[ProcessSet]:
    """Return the registered process sets, by number."""
    return [one.users[0] for _, one in sorted(current_world().sets.items())]


def check_adasum(process_set: ProcessSet) -> None:
    """Raise NotImplementedError where Adasum is not possible."""
    size = current_world().size
    if process_set.process_set_id != 0:
        raise NotImplementedError(
            "Adasum does not support non-global process sets yet. HINT: op=hvd.Average"
        )
    if not adasum.is_possible(size):
        raise NotImplementedError(
            f"Running Adasum with non-power of 2 ranks is not supported yet; there are {size}. "
            "HINT: start a power of 2, or op=hvd.Average"
        )
