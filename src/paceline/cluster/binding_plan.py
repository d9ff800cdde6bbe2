"""Plan of the cores, GPU, network cards and memory of each rank of a host.

This module only plans and binds nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plurals import counted, format_ranges
from .topology.pci_devices import Card, nearest_cards
from .topology.topology import Cpu, Topology
from .topology.visible_gpus import UNKNOWN

KINDS = ("none", "core", "numa", "socket", "device")


# Division of a host's cores among its ranks.
#
# It is even over sockets and NUMA nodes, and gives adjacent cores to the same rank. No rank gets
# cores of two sockets or NUMA nodes, unless there are too few ranks or the nodes are too small.

# If there are fewer ranks than NUMA nodes (sockets), a rank gets several of them only if this
# gives it more cores by at least this factor. With two ranks and three nodes, one node per rank
# is better than two ranks that share a node.
MIN_GAIN = 1.5

Core = tuple[Cpu, ...]  # its hardware threads, as far as they may be used


@dataclass(frozen=True)
class Group:
    """Cores of a host, a socket or a NUMA node, with the smaller groups that it consists of."""

    cores: tuple[Core, ...]
    parts: tuple["Group", ...] = ()

    def fits(self, each: int) -> int:
        """Return how many ranks of ``each`` cores fit if none spans two of the smallest groups."""
        if not self.parts:
            return len(self.cores) // each
        return sum(part.fits(each) for part in self.parts)


def allowed_cores(topology: Topology, allowed: Iterable[int], smt: bool | None) -> list[Core]:
    """Return the cores that have an allowed hardware thread.

    Each core lists its allowed hardware threads; with ``smt=False`` only the first one.
    """
    found: dict[int, list[Cpu]] = {}
    for cpu in topology.at(allowed):
        found.setdefault(cpu.core, []).append(cpu)
    return [tuple(cpus[:1] if smt is False else cpus) for cpus in found.values()]


def group_by_socket(cores: Iterable[Core]) -> Group:
    """Return the cores grouped by socket and NUMA node, sorted, with efficiency cores last."""
    packages: dict[int, dict[int, list[Core]]] = {}
    for core in cores:
        first = core[0]
        node = -1 if first.node is None else first.node
        packages.setdefault(first.package, {}).setdefault(node, []).append(core)
    sockets = []
    for _, package in sorted(packages.items(), key=lambda entry: (min(entry[1]), entry[0])):
        nodes = [
            Group(tuple(sorted(package[node], key=lambda core: (core[0].efficient, core[0].core))))
            for node in sorted(package)
        ]
        sockets.append(_join_groups(nodes))
    return _join_groups(sockets)


def _join_groups(parts: Sequence[Group]) -> Group:
    return Group(tuple(core for part in parts for core in part.cores), tuple(parts))


def cores_per_rank(host: Group, ranks: int) -> int:
    """Return how many cores each rank gets; 0 if there are fewer cores than ranks."""
    nodes = [node for socket in host.parts for node in socket.parts]
    each = _max_cores_per_rank(nodes, ranks)
    for smaller, larger in ((nodes, host.parts), (host.parts, (host,))):
        spread = _max_cores_per_rank(larger, ranks)
        if ranks < len(smaller) and spread > MIN_GAIN * each:
            each = spread
    return each


def _max_cores_per_rank(groups: Sequence[Group], ranks: int) -> int:
    """Return the largest number of cores of a single group that every rank can have exclusively."""
    sizes = [len(group.cores) for group in groups]
    for each in range(max(sizes, default=0), 0, -1):
        if sum(size // each for size in sizes) >= ranks:
            return each
    return 0


def ranks_per_part(group: Group, ranks: int, each: int) -> list[int] | None:
    """Return how many ranks each part gets, in proportion to its cores.

    ``each``: cores per rank. None if a rank would have to span two parts.
    """
    rooms = [part.fits(each) for part in group.parts]
    if sum(rooms) < ranks:
        return None
    return _distribute(group, rooms, ranks)


def _distribute(group: Group, rooms: list[int], ranks: int) -> list[int]:
    sizes = [len(part.cores) for part in group.parts]
    counts = [0] * len(rooms)
    for _ in range(ranks):
        free = [i for i, room in enumerate(rooms) if counts[i] < room]
        counts[max(free, key=lambda i: (sizes[i] / (counts[i] + 1), -counts[i], -i))] += 1
    return counts


def assign_cores(group: Group, ranks: int, each: int) -> list[tuple[Core, ...]]:
    """Return ``each`` cores for every rank: of one NUMA node if possible, else of one socket.

    The group must have enough cores. The result is in the order of the group's cores.
    """
    if not group.parts:
        return [group.cores[i * each : (i + 1) * each] for i in range(ranks)]
    counts = ranks_per_part(group, ranks, each)
    if counts is None:
        rooms = [len(part.cores) // each for part in group.parts]
        counts = _distribute(group, rooms, min(ranks, sum(rooms)))
    found = [
        block
        for part, count in zip(group.parts, counts, strict=True)
        for block in assign_cores(part, count, each)
    ]
    taken = {core for block in found for core in block}
    rest = tuple(core for core in group.cores if core not in taken)
    found += assign_cores(Group(rest), ranks - len(found), each)
    order = {core: i for i, core in enumerate(group.cores)}
    return sorted(found, key=lambda block: order[block[0]])


def assign_groups(group: Group, ranks: int, each: int) -> list[Group] | None:
    """Return one of the smallest groups for every rank, or None if they have too few cores."""
    if not group.parts:
        return [group] * ranks
    counts = ranks_per_part(group, ranks, each)
    if counts is None:
        return None
    found: list[Group] = []
    for part, count in zip(group.parts, counts, strict=True):
        found += assign_groups(part, count, each) or []
    return found


# Choice of cores near each rank's GPU: of the GPU's NUMA node, else of its socket.

Shares = list[tuple[Core, ...]]


@dataclass(frozen=True)
class GPU:
    """A visible GPU: its number by bus id (-1: unknown), and its card in sysfs."""

    number: int
    card: Card | None = None


def cores_near_gpus(
    topology: Topology,
    cores: Sequence[Core],
    gpus: Sequence[GPU],
    ranks: int,
    each: int | None,
) -> tuple[Shares, list[str]]:
    """Return cores for each rank near the GPU of its number, and notes for the user.

    each: Cores per rank; None: as many as all ranks can have.
    """
    _check_gpus(gpus, ranks)
    used = [gpu.card for gpu in gpus[:ranks] if gpu.card is not None]
    notes = []
    lost = [card.name for card in used if not threads_near_card(topology, card)]
    if lost:
        notes.append(f"this node does not report which cores are near {', '.join(lost)}")
    close = [_cores_with(cores, threads_near_card(topology, card)) for card in used]
    found = _divide_pools(close, each)
    if found is not None:
        return found, notes
    sockets = [_cores_with(cores, _threads_of_socket(topology, card)) for card in used]
    found = _divide_pools(sockets, each)
    if found is not None:
        notes.append(
            "the NUMA nodes of the GPUs have too few cores: other cores of the socket are used"
        )
        return _swap_for_proximity(found, sockets, close), notes
    raise ValueError(_too_few_cores_message(topology, cores, used, sockets, each))


def threads_near_card(topology: Topology, card: Card) -> set[int]:
    """Return the hardware threads near a card; empty if the host does not report them."""
    known = {cpu.number for cpu in topology.cpus}
    if known & set(card.cpus):
        return known & set(card.cpus)
    homes = [node for node in topology.nodes if node.cpus]
    own = next((node for node in topology.nodes if node.number == card.node), None)
    if own is None or not homes:
        return set()
    return set(min(homes, key=lambda node: own.distances.get(node.number, 255)).cpus)


def _threads_of_socket(topology: Topology, card: Card) -> set[int]:
    packages = topology.packages(threads_near_card(topology, card))
    return {cpu.number for cpu in topology.cpus if cpu.package in packages}


def _cores_with(cores: Sequence[Core], cpus: set[int]) -> tuple[Core, ...]:
    """Return the cores with any of these hardware threads; all cores if ``cpus`` is empty."""
    return tuple(core for core in cores if not cpus or any(cpu.number in cpus for cpu in core))


def _divide_pools(pools: Sequence[tuple[Core, ...]], each: int | None) -> Shares | None:
    """Return ``each`` cores for every rank from its pool, or None if a pool has too few.

    each None: As many as all ranks can have. Ranks with the same pool divide it.
    """
    ranks_of: dict[tuple[Core, ...], list[int]] = {}
    for rank, pool in enumerate(pools):
        ranks_of.setdefault(pool, []).append(rank)
    max_size = min(
        cores_per_rank(group_by_socket(pool), len(ranks)) for pool, ranks in ranks_of.items()
    )
    for size in range(max_size, 0, -1) if each is None else (each,):
        cores_by_rank: dict[int, tuple[Core, ...]] = {}
        # Pools may overlap: hosts do not always report which cores are near a GPU.
        taken: set[Core] = set()
        for pool, ranks in sorted(ranks_of.items(), key=lambda entry: len(entry[0])):
            free = group_by_socket(core for core in pool if core not in taken)
            if len(free.cores) // size < len(ranks):
                break
            cores_by_rank.update(zip(ranks, assign_cores(free, len(ranks), size), strict=True))
            taken.update(core for rank in ranks for core in cores_by_rank[rank])
        if len(cores_by_rank) == len(pools):
            return [cores_by_rank[rank] for rank in range(len(pools))]
    return None


def _swap_for_proximity(
    shares: Shares, pools: Sequence[tuple[Core, ...]], close: Sequence[tuple[Core, ...]]
) -> Shares:
    """Return the shares, exchanged among ranks of the same pool so that ranks get close cores."""
    ranks = range(len(shares))
    pairs = [(rank, other) for rank in ranks for other in ranks if pools[rank] == pools[other]]
    pairs.sort(key=lambda pair: -len(set(close[pair[0]]) & set(shares[pair[1]])))
    share_of_rank: dict[int, int] = {}
    for rank, other in pairs:
        if rank not in share_of_rank and other not in share_of_rank.values():
            share_of_rank[rank] = other
    return [shares[share_of_rank[rank]] for rank in ranks]


def _check_gpus(gpus: Sequence[GPU], ranks: int) -> None:
    if not gpus:
        raise ValueError(
            "--bind device: no GPU is visible on this node. HINT: --bind core or --bind socket"
        )
    if ranks > len(gpus):
        available = f"{len(gpus)} GPUs are" if len(gpus) > 1 else "1 GPU is"
        raise ValueError(
            f"--bind device: {ranks} ranks need a GPU each, and {available} visible on this node. "
            f"HINT: -n {len(gpus)} or --bind core"
        )
    unknown = [gpu.number for gpu in gpus[:ranks] if gpu.card is None]
    if UNKNOWN in unknown:
        raise ValueError(
            "--bind device: CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER hides which cards the GPUs "
            "are. HINT: use GPU numbers in CUDA_VISIBLE_DEVICES and "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or "
            "--bind core"
        )
    if unknown:
        raise ValueError(
            "--bind device: the PCI bus of this node does not show GPU "
            f"{format_ranges(unknown)}, so the cores near it are unknown. HINT: --bind core or "
            "--bind socket"
        )


def _too_few_cores_message(
    topology: Topology,
    cores: Sequence[Core],
    cards: Sequence[Card],
    sockets: Sequence[tuple[Core, ...]],
    each: int | None,
) -> str:
    """Return the error message: which GPU has too few cores, and how many cores are possible."""
    granted = format_ranges(sorted(cpu.number for core in cores for cpu in core))
    for card, pool in zip(cards, sockets, strict=True):
        packages = topology.packages(threads_near_card(topology, card))
        socket = f"socket {format_ranges(list(packages))}"
        names = [other.name for other, its in zip(cards, sockets, strict=True) if its == pool]
        if not pool:
            return (
                f"--bind device: no core of {socket}, where the GPU {card.name} is, is granted to "
                f"the job ({granted} are). HINT: --bind core, or ask the scheduler for cores of "
                f"{socket}"
            )
        if len(pool) // (each or 1) < len(names):
            break
    need = "a core each" if each is None else counted(len(names) * each, "core")
    option = "" if each is None else f" with --cpus-per-rank {each}"
    ranks_text = f"{len(names)} ranks{option} need" if len(names) > 1 else f"1 rank{option} needs"
    gpus_text = f"the GPUs {', '.join(names)} are" if len(names) > 1 else f"the GPU {names[0]} is"
    return (
        f"--bind device: {ranks_text} {need} of {socket}, where {gpus_text}, and {len(pool)} are "
        f"allowed there. HINT: {_possible_options(sockets, each)}"
    )


def _possible_options(sockets: Sequence[tuple[Core, ...]], each: int | None) -> str:
    fitting = (n for n in range((each or 1) - 1, 0, -1) if _divide_pools(sockets, n) is not None)
    limit = next(fitting, None)
    return f"--cpus-per-rank {limit}" if limit is not None else "--bind core, or fewer ranks"


@dataclass(frozen=True)
class RankBinding:
    """The resources that one rank runs on.

    Attributes:
        cpus: Hardware threads.
        packages: Sockets of these hardware threads.
        nodes: NUMA nodes of these hardware threads.
        device: Index of the rank's GPU among the visible GPUs.
        cards: Names of the nearest network cards.
        memory: NUMA nodes to prefer for memory; empty if none is better than another.
        threads: Number of threads for OpenMP and torch.
        notes: Remarks about the plan for the user, the same for all its ranks.
    """

    cpus: tuple[int, ...]
    packages: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    device: int | None = None
    cards: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    threads: int = 1
    notes: tuple[str, ...] = ()


def plan(
    topology: Topology,
    allowed: set[int],
    ranks: int,
    *,
    bind: str,
    cpus_per_rank: int | None = None,
    threads: int | None = None,
    smt: bool | None = None,
    cards: Sequence[Card] = (),
    visible: list[int] | None = None,
) -> list[RankBinding]:
    """Return the place of every rank of this host.

    Args:
        allowed: Hardware threads that the scheduler granted.
        cpus_per_rank: Cores per rank. Default: an equal part of the cores.
        threads: Threads per rank. Default: one per core, or with ``smt=True`` one per hardware
            thread.
        smt: False uses only the first hardware thread of each core.
        visible: Numbers, in the order of bus ids, of the GPUs that are devices 0, 1, ...
            None: all GPUs.

    Raises:
        ValueError: The host cannot satisfy the request.
    """
    _check(bind, ranks, cpus_per_rank, threads)
    cores = allowed_cores(topology, allowed, smt)
    notes = _notes(topology, allowed, cores, smt)
    if not cores:
        raise ValueError(
            f"--bind {bind}: none of the hardware threads granted to the job "
            f"({format_ranges(sorted(allowed))}) exists on this node "
            f"({format_ranges([cpu.number for cpu in topology.cpus])}). HINT: start it on the "
            "node where the ranks run; a container may hide hardware threads"
        )
    _check_cores(bind, ranks, cpus_per_rank, len(cores))
    devices = visible_gpus(cards, visible)
    shares: Sequence[Sequence[Core]]
    if bind in ("core", "device"):
        cores, note = _performance_cores(cores, ranks * (cpus_per_rank or 1))
        notes += note
        if bind == "core":
            host = group_by_socket(cores)
            shares = assign_cores(host, ranks, cpus_per_rank or cores_per_rank(host, ranks))
        else:
            shares, note = cores_near_gpus(topology, cores, devices, ranks, cpus_per_rank)
            notes += note
        notes += _free_cores_note(cores, shares, bind == "core" and cpus_per_rank is None)
    else:
        weak = sum(core[0].efficient for core in cores)
        notes += [f"{weak} of the {len(cores)} cores are efficiency cores"] if weak else []
        shares = _shared_cores(group_by_socket(cores), ranks, bind, cpus_per_rank)
    return _bind_ranks(topology, shares, cards, devices, (cpus_per_rank, threads, smt), notes)


def _bind_ranks(
    topology: Topology,
    shares: Sequence[Sequence[Core]],
    cards: Sequence[Card],
    devices: list[GPU],
    options: tuple[int | None, int | None, bool | None],
    notes: list[str],
) -> list[RankBinding]:
    cpus_per_rank, threads, smt = options
    masks = [tuple(sorted(cpu.number for core in share for cpu in core)) for share in shares]
    sharers = Counter(masks)
    nics = [card for card in cards if card.kind == "ib"]
    nics = nics or [card for card in cards if card.kind == "net"]
    bindings = []
    for rank, (share, mask) in enumerate(zip(shares, masks, strict=True)):
        units = len(mask) if smt else len(share)
        count = units * cpus_per_rank // len(share) if cpus_per_rank else units // sharers[mask]
        nodes = topology.numa_nodes(mask)
        device = rank if len(shares) <= len(devices) else None
        near_card = None if device is None else devices[device].card
        if near_card is None:
            near_card = Card("", "", nodes[0] if len(nodes) == 1 else None, mask)
        bindings.append(
            RankBinding(
                mask,
                topology.packages(mask),
                nodes,
                device,
                tuple(nic.name for nic in nearest_cards(near_card, nics, topology)),
                _memory(topology, nodes),
                threads or max(1, count),
                tuple(notes),
            )
        )
    return bindings


def _memory(topology: Topology, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the NUMA nodes whose memory is nearest to ``nodes``.

    Empty if ``nodes`` are all NUMA nodes that have cores: no memory is nearer than other memory.
    """
    with_cores = {node.number: node for node in topology.nodes if node.cpus}
    if set(nodes) >= set(with_cores):
        return ()
    with_memory = [number for number, node in with_cores.items() if node.bytes]
    wanted = set()
    for number in nodes:
        distances = with_cores[number].distances
        empty = with_memory and number not in with_memory
        nearest = min(with_memory, key=lambda other: distances.get(other, 255)) if empty else number
        wanted.add(nearest)
    return tuple(sorted(wanted))


def _shared_cores(
    host: Group, ranks: int, bind: str, cpus_per_rank: int | None
) -> Sequence[Sequence[Core]]:
    """Return for every rank all cores of the host, or all of one of its sockets or NUMA nodes."""
    if bind == "none":
        return [host.cores] * ranks
    if bind == "socket":
        host = Group(host.cores, tuple(Group(socket.cores) for socket in host.parts))
    groups = assign_groups(host, ranks, cpus_per_rank or 1)
    if groups is None:
        sizes = [len(part.cores) for part in _smallest(host)]
        max_cores = max(
            n for n in range(max(sizes) + 1) if not n or assign_groups(host, ranks, n) is not None
        )
        part_name = "socket" if bind == "socket" else "NUMA node"
        parts_text = f"{len(sizes)} {part_name}s, of {max(sizes)} allowed cores at most"
        raise ValueError(
            f"--bind {bind}: {counted(ranks, 'rank')} with --cpus-per-rank {cpus_per_rank} "
            f"{'does' if ranks == 1 else 'do'} not fit in this host's "
            f"{parts_text if len(sizes) > 1 else f'one {part_name}, of {sizes[0]} allowed cores'}. "
            f"HINT: --cpus-per-rank {max_cores}"
        )
    if bind == "socket":
        return [group.cores for group in groups]
    return [  # a NUMA node may span several sockets if the firmware reports only one node
        [core for core in host.cores if core[0].node == group.cores[0][0].node]
        if group.cores[0][0].node is not None
        else group.cores
        for group in groups
    ]


def _smallest(group: Group) -> list[Group]:
    return [g for part in group.parts for g in _smallest(part)] if group.parts else [group]


def _check(bind: str, ranks: int, cpus_per_rank: int | None, threads: int | None) -> None:
    if bind not in KINDS:
        raise ValueError(
            f"--bind {bind} is not known. HINT: {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    for option, value in (
        ("-n", ranks),
        ("--cpus-per-rank", cpus_per_rank),
        ("--threads", threads),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be 1 or more; this is {value}. HINT: {option} 1")


def _check_cores(bind: str, ranks: int, cpus_per_rank: int | None, cores: int) -> None:
    verb = "needs" if ranks == 1 else "need"
    allowed_text = f"the job may use {cores}"
    is_checked_here = bind in ("none", "core")  # the other kinds check their room more precisely
    if is_checked_here and cpus_per_rank is not None and ranks * cpus_per_rank > cores:
        hints = [f"--cpus-per-rank {cores // ranks}"] if cores >= ranks else []
        hints += [f"-n {cores // cpus_per_rank}"] if cores >= cpus_per_rank else []
        raise ValueError(
            f"--bind {bind}: {counted(ranks, 'rank')} with --cpus-per-rank {cpus_per_rank} {verb} "
            f"{counted(ranks * cpus_per_rank, 'core')}, and {allowed_text}. "
            f"HINT: {' or '.join(hints) or '--bind none without --cpus-per-rank'}"
        )
    if bind != "none" and ranks > cores:
        raise ValueError(
            f"--bind {bind}: {ranks} ranks need a core each, and {allowed_text}. "
            f"HINT: -n {cores} or --bind none"
        )


def visible_gpus(cards: Sequence[Card], visible: list[int] | None) -> list[GPU]:
    """Return the GPUs that are devices 0, 1, ...; ``visible``: see ``plan``."""
    gpus = [card for card in cards if card.kind == "gpu"]
    if visible is None:
        return [GPU(i, card) for i, card in enumerate(gpus)]
    return [GPU(i, gpus[i] if 0 <= i < len(gpus) else None) for i in visible]


def _notes(topology: Topology, allowed: set[int], cores: list[Core], smt: bool | None) -> list[str]:
    """Return remarks about the hardware threads that the scheduler granted."""
    found = [topology.guessed] if topology.guessed else []
    unknown = sorted(allowed - {cpu.number for cpu in topology.cpus})
    if unknown:
        found.append(
            f"the scheduler grants the hardware threads {format_ranges(unknown)}, which this "
            "node does not have"
        )
    all_threads = Counter(cpu.core for cpu in topology.cpus)
    partial_cores = sum(len(core) < all_threads[core[0].core] for core in cores)
    if partial_cores and smt is not False:
        found.append(
            f"the job may use only some of the hardware threads of {counted(partial_cores, 'core')}"
        )
    if smt and all(len(core) == 1 for core in cores):
        found.append("the job may use only one hardware thread of each core")
    return found


def _performance_cores(cores: list[Core], needed: int) -> tuple[list[Core], list[str]]:
    """Return the cores without the efficiency cores if the others suffice, and notes."""
    performance_cores = [core for core in cores if not core[0].efficient]
    count = len(cores) - len(performance_cores)
    if not count or not performance_cores:
        return cores, []
    if len(performance_cores) < needed:
        return cores, [
            f"efficiency cores are used too, because the node has only {len(performance_cores)} "
            "performance cores"
        ]
    return performance_cores, [
        f"{counted(count, 'efficiency core')} {'is' if count == 1 else 'are'} not used"
    ]


def _free_cores_note(cores: list[Core], shares: Sequence[Sequence[Core]], even: bool) -> list[str]:
    """Return a note about unassigned cores; after an even division, with how to use more."""
    ranks, cores_per_rank = len(shares), len(shares[0])
    unused = len(cores) - ranks * cores_per_rank
    if not unused:
        return []
    hint = ""
    if even and len(cores) // ranks > cores_per_rank:
        hint = (
            f"; --cpus-per-rank {len(cores) // ranks} uses more cores, but divides ranks over "
            "NUMA nodes"
        )
    return [
        f"{unused} of {counted(len(cores), 'core')} {'are' if unused > 1 else 'is'} not used{hint}"
    ]
