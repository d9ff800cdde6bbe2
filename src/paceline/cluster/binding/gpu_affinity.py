"""Choice of cores near each rank's GPU: of the GPU's NUMA node, else of its socket."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...plurals import counted, format_ranges
from ..topology.pci_devices import Card
from ..topology.topology import Topology
from ..topology.visible_gpus import UNKNOWN
from .divide_cores import Core, assign_cores, cores_per_rank, group_by_socket

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
    _check(gpus, ranks)
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


def _check(gpus: Sequence[GPU], ranks: int) -> None:
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
