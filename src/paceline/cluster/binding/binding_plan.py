"""Plan of the cores, GPU, network cards and memory of each rank of a host, and its problems.

This module only plans and binds nothing. ``binding_problems`` checks a plan, and the bindings that
were read back from running ranks, by the same rules.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...plurals import counted, format_ranges, named_ranks
from ..topology.pci_devices import Card, nearest_cards
from ..topology.topology import Topology
from ..topology.visible_gpus import UNKNOWN
from .divide_cores import (
    Core,
    Group,
    allowed_cores,
    assign_cores,
    assign_groups,
    cores_per_rank,
    group_by_socket,
)

KINDS = ("none", "core", "numa", "socket", "device")


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
    most = min(
        cores_per_rank(group_by_socket(pool), len(ranks)) for pool, ranks in ranks_of.items()
    )
    for size in range(most, 0, -1) if each is None else (each,):
        found: dict[int, tuple[Core, ...]] = {}
        # Pools may overlap: hosts do not always report which cores are near a GPU.
        taken: set[Core] = set()
        for pool, ranks in sorted(ranks_of.items(), key=lambda entry: len(entry[0])):
            free = group_by_socket(core for core in pool if core not in taken)
            if len(free.cores) // size < len(ranks):
                break
            found.update(zip(ranks, assign_cores(free, len(ranks), size), strict=True))
            taken.update(core for rank in ranks for core in found[rank])
        if len(found) == len(pools):
            return [found[rank] for rank in range(len(pools))]
    return None


def _swap_for_proximity(
    found: Shares, pools: Sequence[tuple[Core, ...]], close: Sequence[tuple[Core, ...]]
) -> Shares:
    """Return the shares, exchanged among ranks of the same pool so that ranks get close cores."""
    ranks = range(len(found))
    pairs = [(rank, of) for rank in ranks for of in ranks if pools[rank] == pools[of]]
    pairs.sort(key=lambda pair: -len(set(close[pair[0]]) & set(found[pair[1]])))
    given: dict[int, int] = {}
    for rank, of in pairs:
        if rank not in given and of not in given.values():
            given[rank] = of
    return [found[given[rank]] for rank in ranks]


def _check_gpus(gpus: Sequence[GPU], ranks: int) -> None:
    if not gpus:
        raise ValueError(
            "--bind device: no GPU is visible on this node. HINT: --bind core or --bind socket"
        )
    if ranks > len(gpus):
        there = f"{len(gpus)} GPUs are" if len(gpus) > 1 else "1 GPU is"
        raise ValueError(
            f"--bind device: {ranks} ranks need a GPU each, and {there} visible on this node. "
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
    used: Sequence[Card],
    sockets: Sequence[tuple[Core, ...]],
    each: int | None,
) -> str:
    """Return the error message: which GPU has too few cores, and how many cores are possible."""
    granted = format_ranges(sorted(cpu.number for core in cores for cpu in core))
    for card, pool in zip(used, sockets, strict=True):
        near = topology.packages(threads_near_card(topology, card))
        where = f"socket {format_ranges(list(near))}"
        ranks = [other.name for other, its in zip(used, sockets, strict=True) if its == pool]
        if not pool:
            return (
                f"--bind device: no core of {where}, where the GPU {card.name} is, is granted to "
                f"the job ({granted} are). HINT: --bind core, or ask the scheduler for cores of "
                f"{where}"
            )
        if len(pool) // (each or 1) < len(ranks):
            break
    need = "a core each" if each is None else counted(len(ranks) * each, "core")
    asked = "" if each is None else f" with --cpus-per-rank {each}"
    who = f"{len(ranks)} ranks{asked} need" if len(ranks) > 1 else f"1 rank{asked} needs"
    gpus = f"the GPUs {', '.join(ranks)} are" if len(ranks) > 1 else f"the GPU {ranks[0]} is"
    return (
        f"--bind device: {who} {need} of {where}, where {gpus}, and {len(pool)} are allowed there. "
        f"HINT: {_possible_options(sockets, each)}"
    )


def _possible_options(sockets: Sequence[tuple[Core, ...]], each: int | None) -> str:
    fitting = (n for n in range((each or 1) - 1, 0, -1) if _divide_pools(sockets, n) is not None)
    most = next(fitting, None)
    return f"--cpus-per-rank {most}" if most is not None else "--bind core, or fewer ranks"


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
    devices = _visible(cards, visible)
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
    asked: tuple[int | None, int | None, bool | None],
    notes: list[str],
) -> list[RankBinding]:
    cpus_per_rank, threads, smt = asked
    masks = [tuple(sorted(cpu.number for core in share for cpu in core)) for share in shares]
    sharers = Counter(masks)
    nics = [card for card in cards if card.kind == "ib"]
    nics = nics or [card for card in cards if card.kind == "net"]
    found = []
    for i, (share, mask) in enumerate(zip(shares, masks, strict=True)):
        units = len(mask) if smt else len(share)
        own = units * cpus_per_rank // len(share) if cpus_per_rank else units // sharers[mask]
        nodes = topology.numa_nodes(mask)
        device = i if len(shares) <= len(devices) else None
        here = None if device is None else devices[device].card
        if here is None:
            here = Card("", "", nodes[0] if len(nodes) == 1 else None, mask)
        found.append(
            RankBinding(
                mask,
                topology.packages(mask),
                nodes,
                device,
                tuple(nic.name for nic in nearest_cards(here, nics, topology)),
                _memory(topology, nodes),
                threads or max(1, own),
                tuple(notes),
            )
        )
    return found


def _memory(topology: Topology, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the NUMA nodes whose memory is nearest to ``nodes``.

    Empty if ``nodes`` are all NUMA nodes that have cores: no memory is nearer than other memory.
    """
    homes = {node.number: node for node in topology.nodes if node.cpus}
    if set(nodes) >= set(homes):
        return ()
    filled = [number for number, node in homes.items() if node.bytes]
    wanted = set()
    for number in nodes:
        far = homes[number].distances
        empty = filled and number not in filled
        wanted.add(min(filled, key=lambda other: far.get(other, 255)) if empty else number)
    return tuple(sorted(wanted))


def _shared_cores(
    host: Group, ranks: int, bind: str, cpus_per_rank: int | None
) -> Sequence[Sequence[Core]]:
    """Return for every rank all cores of the host, or all of one of its sockets or NUMA nodes."""
    if bind == "none":
        return [host.cores] * ranks
    if bind == "socket":
        host = Group(host.cores, tuple(Group(socket.cores) for socket in host.parts))
    found = assign_groups(host, ranks, cpus_per_rank or 1)
    if found is None:
        sizes = [len(part.cores) for part in _smallest(host)]
        most = max(
            n for n in range(max(sizes) + 1) if not n or assign_groups(host, ranks, n) is not None
        )
        what = "socket" if bind == "socket" else "NUMA node"
        there = f"{len(sizes)} {what}s, of {max(sizes)} allowed cores at most"
        raise ValueError(
            f"--bind {bind}: {counted(ranks, 'rank')} with --cpus-per-rank {cpus_per_rank} "
            f"{'does' if ranks == 1 else 'do'} not fit in this host's "
            f"{there if len(sizes) > 1 else f'one {what}, of {sizes[0]} allowed cores'}. "
            f"HINT: --cpus-per-rank {most}"
        )
    if bind == "socket":
        return [group.cores for group in found]
    return [  # a NUMA node may span several sockets if the firmware reports only one node
        [core for core in host.cores if core[0].node == group.cores[0][0].node]
        if group.cores[0][0].node is not None
        else group.cores
        for group in found
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
    there = f"the job may use {cores}"
    plain = bind in ("none", "core")  # the other kinds check their room more precisely
    if plain and cpus_per_rank is not None and ranks * cpus_per_rank > cores:
        ways = [f"--cpus-per-rank {cores // ranks}"] if cores >= ranks else []
        ways += [f"-n {cores // cpus_per_rank}"] if cores >= cpus_per_rank else []
        raise ValueError(
            f"--bind {bind}: {counted(ranks, 'rank')} with --cpus-per-rank {cpus_per_rank} {verb} "
            f"{counted(ranks * cpus_per_rank, 'core')}, and {there}. "
            f"HINT: {' or '.join(ways) or '--bind none without --cpus-per-rank'}"
        )
    if bind != "none" and ranks > cores:
        raise ValueError(
            f"--bind {bind}: {ranks} ranks need a core each, and {there}. "
            f"HINT: -n {cores} or --bind none"
        )


def _visible(cards: Sequence[Card], visible: list[int] | None) -> list[GPU]:
    gpus = [card for card in cards if card.kind == "gpu"]
    if visible is None:
        return [GPU(i, card) for i, card in enumerate(gpus)]
    return [GPU(i, gpus[i] if 0 <= i < len(gpus) else None) for i in visible]


def _notes(topology: Topology, allowed: set[int], cores: list[Core], smt: bool | None) -> list[str]:
    """Return remarks about the hardware threads that the scheduler granted."""
    found = [topology.guessed] if topology.guessed else []
    strange = sorted(allowed - {cpu.number for cpu in topology.cpus})
    if strange:
        found.append(
            f"the scheduler grants the hardware threads {format_ranges(strange)}, which this "
            "node does not have"
        )
    all_threads = Counter(cpu.core for cpu in topology.cpus)
    half = sum(len(core) < all_threads[core[0].core] for core in cores)
    if half and smt is not False:
        found.append(
            f"the job may use only some of the hardware threads of {counted(half, 'core')}"
        )
    if smt and all(len(core) == 1 for core in cores):
        found.append("the job may use only one hardware thread of each core")
    return found


def _performance_cores(cores: list[Core], needed: int) -> tuple[list[Core], list[str]]:
    """Return the cores without the efficiency cores if the others suffice, and notes."""
    strong = [core for core in cores if not core[0].efficient]
    weak = len(cores) - len(strong)
    if not weak or not strong:
        return cores, []
    if len(strong) < needed:
        return cores, [
            f"efficiency cores are used too, because the node has only {len(strong)} "
            "performance cores"
        ]
    return strong, [f"{counted(weak, 'efficiency core')} {'is' if weak == 1 else 'are'} not used"]


def _free_cores_note(cores: list[Core], shares: Sequence[Sequence[Core]], even: bool) -> list[str]:
    """Return a note about unassigned cores; after an even division, with how to use more."""
    ranks, each = len(shares), len(shares[0])
    left = len(cores) - ranks * each
    if not left:
        return []
    more = ""
    if even and len(cores) // ranks > each:
        more = (
            f"; --cpus-per-rank {len(cores) // ranks} uses more cores, but divides ranks over "
            "NUMA nodes"
        )
    return [f"{left} of {counted(len(cores), 'core')} {'are' if left > 1 else 'is'} not used{more}"]


def binding_problems(
    places: Sequence[RankBinding],
    topology: Topology,
    cards: Sequence[Card] = (),
    *,
    allowed: set[int] | None = None,
    visible: list[int] | None = None,
    smt: bool | None = None,
) -> list[str]:
    """Return descriptions of likely binding mistakes, for the user.

    Ranks of a host are numbered from 0. With ``smt=True``, one thread on every hardware thread is
    not reported.
    """
    said: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        for words in _problems_of_rank(place, topology, allowed, _visible(cards, visible)):
            said.setdefault(words, []).append(rank)
    found = [f"{named_ranks(ranks)}: {words}" for words, ranks in said.items()]
    sharers: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        sharers.setdefault(tuple(sorted(place.cpus)), []).append(rank)
    for mask, ranks in sharers.items():
        cores = topology.cores(mask)
        threads = sum(places[rank].threads for rank in ranks)
        if threads > (len(topology.at(mask)) if smt else len(cores)):
            what = counted(len(cores), "core")
            found.append(
                f"{named_ranks(ranks)}: {counted(threads, 'thread')} on {what} "
                f"({format_ranges(list(mask))})"
            )
    return found + _overlaps(places, topology)


def _problems_of_rank(
    place: RankBinding, topology: Topology, allowed: set[int] | None, gpus: list[GPU]
) -> list[str]:
    found = []
    known = {cpu.number for cpu in topology.cpus}
    strange = set(place.cpus) - known
    if strange:
        found.append(
            f"this node does not have the hardware threads {format_ranges(sorted(strange))}"
        )
    if allowed is not None and set(place.cpus) & known - allowed:
        outside = sorted(set(place.cpus) & known - allowed)
        found.append(f"hardware threads {format_ranges(outside)} are not granted to this job")
    packages = topology.packages(place.cpus)
    if len(packages) > 1:
        found.append(f"over sockets {format_ranges(list(packages))}")
    card = None
    if place.device is not None and place.device < len(gpus):
        card = gpus[place.device].card
    if card is not None:
        near = topology.packages(threads_near_card(topology, card))
        if near and packages and not set(near) & set(packages):
            found.append(
                f"on socket {format_ranges(list(packages))}, its GPU {card.name} on socket "
                f"{format_ranges(list(near))}"
            )
    return found


def _overlaps(places: Sequence[RankBinding], topology: Topology) -> list[str]:
    """Describe ranks that share only some of their cores.

    Ranks that share all their cores are not reported: this is intended.
    """
    on: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        for core in topology.cores(place.cpus):
            on.setdefault(core, []).append(rank)
    meeting: dict[tuple[int, ...], list[int]] = {}
    for core, ranks in on.items():
        if len({tuple(sorted(places[rank].cpus)) for rank in ranks}) > 1:
            meeting.setdefault(tuple(ranks), []).append(core)
    found = []
    for together, cores in meeting.items():
        cpus = [cpu.number for cpu in topology.cpus if cpu.core in cores]
        what = "the same core" if len(cores) == 1 else f"the same {len(cores)} cores"
        found.append(
            f"{named_ranks(list(together))}: on {what} (hardware threads {format_ranges(cpus)})"
        )
    return found
