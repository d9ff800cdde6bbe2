"""The ``torch.distributed`` backend "paceline", below the recording of collectives.

It is registered with torch as a backend, so torch also uses it for subgroups. Ranks on one host
exchange CPU tensors through shared memory (comm.shared), ranks on several hosts through a hierarchy
on top of it (comm.hosts). gloo does what these do not support, and NCCL is used for GPU tensors.
"""

import functools
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..cluster.topology.network_interfaces import Link
from ..cluster.topology.racks import RACKS_VARIABLE, rack_of
from ..record.hooks.collective_check import announce_check, make_check
from ..record.hooks.collectives import RecordedGroup, measure_wrapper_cost
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder, update_all_headers
from . import replica_check
from .hosts import schedules
from .hosts.c_wire import Wire, library
from .hosts.connect import Connections, PeerListener, exchange_links
from .hosts.failure_agreement import FailureAgreement
from .hosts.hierarchy import CHEAPEST, HierarchicalKernel
from .hosts.rank_placement import RankPlacement, place_ranks
from .hosts.schedules import LinkModel
from .members.membership import connect_gloo
from .shared import memory
from .shared import open_group as shared
from .shared.c_kernel import CKernel
from .shared.messages import Messages
from .shared.open_group import (
    ALGORITHM_VARIABLE,
    DISABLED_BY_USER,
    ON_SEVERAL_HOSTS,
    SOCKET_REDUCTION,
    open_kernel,
)
from .shared.torch_kernel import TorchKernel
from .shared_memory_group import SharedMemoryGroup

NAME = "paceline"
# Longer timeouts overflow the clocks of PyTorch's stores and of gloo, which count nanoseconds.
MAX_TIMEOUT = timedelta(days=10_000)
_recorder: Recorder | None = None  # records the groups that are created from now on


# Choose whether ranks on several hosts use the hierarchical exchange: all of them, or none.

KERNEL_NOT_BUILT = "the kernel in C was not built at the installation"
LINK_MBIT_VARIABLE = "PACELINE_LINK_MBIT"  # speed of links that report none, or share it
DEFAULT_LINK_MBIT = 1000.0  # of links that report none
UNEVEN_LINK_RATIO = 2.0  # between hosts; links that differ more are reported
# one connection saturates so much; more connections than needed slow each other down
MBIT_PER_RAIL = 2500

_uneven_links_reported = False


def open_hierarchy(
    store: Any, rank: int, size: int, timeout: float, names: Sequence[int] = ()
) -> tuple[HierarchicalKernel | None, str]:
    """Return the kernel of a group of ``size`` ranks on several hosts, which meet in ``store``.

    Return None and the reason where one of the ranks can't take part. timeout: seconds. names: the
    ranks' numbers in the job.

    Raises ValueError on all ranks if the environment variables of the algorithm differ or name an
    unknown one, if the speed of a link is not a number, or if the racks do not contain one of the
    hosts; RuntimeError of torch's store if a rank is missing.
    """
    own_links, no_link_reason = _own_links()
    all_ranks = _all_gather_json(store, "who", rank, size, _own_facts(own_links))
    if mistakes := [facts["mistake"] for facts in all_ranks if facts["mistake"]]:
        raise ValueError(mistakes[0])
    speeds = [
        [_parse_mbit(mbit) for mbit in facts["mbit"]] or [DEFAULT_LINK_MBIT] for facts in all_ranks
    ]
    # one rank of the job, whichever groups there are
    if rank == 0 and (not names or names[0] == 0):
        _warn_uneven_links(all_ranks, speeds)
    max_rails = min(sum(max(1, round(mbit / MBIT_PER_RAIL)) for mbit in links) for links in speeds)
    columns = {
        key: [facts[key] for facts in all_ranks] for key in ("host", "name", "rack", "algorithm")
    }
    placement = place_ranks(columns["host"], columns["name"], rank, max_rails, columns["rack"])
    algorithms = [
        *schedules.ALL_REDUCE,
        *[schedules.RACKS] * (placement.hosts_per_rack > 0),
        SOCKET_REDUCTION,
    ]
    algorithm = _same_algorithm(columns["algorithm"], algorithms, names)
    ranks_per_link = -(-placement.num_rails // min(map(len, speeds)))
    link = LinkModel(bytes_per_s=min(map(min, speeds)) * 1e6 / 8 / ranks_per_link)

    host_ranks = placement.ranks_by_host[placement.host_index]
    host_global_ranks = [names[mate] if names else mate for mate in host_ranks]
    host_store = PrefixStore(f"host/{placement.host_index}", store)
    kernel, reason = shared.open_kernel(
        host_store, placement.local_rank, len(host_ranks), timeout, host_global_ranks
    )
    if not reason and not isinstance(kernel, CKernel):
        reason = KERNEL_NOT_BUILT
    reason = shared.agree(store, "kernel", rank, size, reason, "")
    if reason:
        return None, _close(kernel, reason)
    assert isinstance(kernel, CKernel)
    connections, reason = _connect_peers(store, placement, size, own_links, no_link_reason)
    reason = shared.agree(store, "met", rank, size, reason, "")
    if reason:
        connections.close()
        return None, _close(kernel, reason)
    wire = None
    if placement.local_rank < placement.num_connected:
        fds = {host: s.fileno() for host, s in connections.sockets.items()}
        wire = Wire(len(placement.ranks_by_host), placement.host_index, fds, kernel.broken_address)
    failure = FailureAgreement(store, placement, connections, names)
    return HierarchicalKernel(placement, kernel, wire, link, failure, algorithm), ""


def _own_facts(links: list[Link]) -> dict[str, Any]:
    """Return what the other ranks have to know of this one."""
    rack, mistake = _own_rack()
    speeds = [os.environ.get(LINK_MBIT_VARIABLE) or each.speed for each in links]
    return {
        "host": memory.sharing_domain(),
        "name": socket.gethostname(),
        "rack": rack,
        "mistake": mistake,
        "algorithm": os.environ.get(ALGORITHM_VARIABLE, CHEAPEST),
        "links": [each.interface for each in links],
        "mbit": [speed or DEFAULT_LINK_MBIT for speed in speeds],
    }


def _close(kernel: Any, reason: str) -> str:
    if kernel is not None:
        kernel.close()
    return reason


def _own_links() -> tuple[list[Link], str]:
    """Return the links of this host, and the reason where there are none."""
    try:
        library()
        return exchange_links(), ""
    except OSError as error:
        return [], f"{socket.gethostname()}: {error.strerror or error}"


def _own_rack() -> tuple[str, str]:
    """Return the rack of this host, and the mistake in the user's description of the racks."""
    try:
        return rack_of(socket.gethostname()), ""
    except ValueError as mistake:
        return "", str(mistake)


def _parse_mbit(value: str | float) -> float:
    """Return the speed in Mbit/s that the user has set, or that the link reports."""
    try:
        mbit = float(value)
    except ValueError:
        mbit = 0.0
    if not 0 < mbit < float("inf"):
        raise ValueError(
            f"{LINK_MBIT_VARIABLE} must be a number of Mbit/s above 0; this is {value}. "
            f"HINT: {LINK_MBIT_VARIABLE}=10000"
        )
    return mbit


def _warn_uneven_links(all_ranks: list[dict[str, Any]], speeds: list[list[float]]) -> None:
    """Report once the links that are much slower than others."""
    global _uneven_links_reported
    slowest, fastest = min(speeds, key=min), max(map(min, speeds))
    if _uneven_links_reported or fastest < UNEVEN_LINK_RATIO * min(slowest):
        return
    _uneven_links_reported = True
    slow = {
        f"{facts['name']} ({', '.join(facts['links'])}) {min(mbit):,.0f}"
        for facts, mbit in zip(all_ranks, speeds, strict=True)
        if fastest >= UNEVEN_LINK_RATIO * min(mbit)
    }
    notify(
        "paceline: the links between nodes differ in speed. Slow links, in Mbit/s: "
        f"{'; '.join(sorted(slow))}; the others have up to {fastest:,.0f}. The slowest link limits "
        "every collective. HINT: GLOO_SOCKET_IFNAME=NAME selects another interface, "
        f"{LINK_MBIT_VARIABLE}=N sets the speed of links that report a wrong one, and -H "
        "HOST,... leaves nodes out\n"
    )


def _connect_peers(
    store: Any, placement: RankPlacement, size: int, own_links: list[Link], reason: str
) -> tuple[Connections, str]:
    """Return the connections of this rank, and the reason where it has none but should."""
    listener, own_address = None, ""
    if placement.local_rank < placement.num_connected and own_links:
        try:
            listener = PeerListener(own_links[placement.local_rank % len(own_links)])
            own_address = listener.address
        except OSError as error:
            reason = f"{placement.host_names[placement.host_index]}: {error.strerror or error}"
    addresses = _all_gather_json(store, "door", placement.rank, size, own_address)
    if listener is None:
        return Connections(), reason
    peers = {
        host: ranks[placement.local_rank]
        for host, ranks in enumerate(placement.ranks_by_host)
        if host != placement.host_index
    }
    peer_addresses = {host: addresses[peer] for host, peer in peers.items()}
    if not all(peer_addresses.values()):
        listener.close()
        return Connections(), reason
    try:
        return listener.connect_all(
            placement.host_index, peer_addresses, dict(enumerate(placement.host_names))
        ), reason
    except OSError as error:
        reason = f"{placement.host_names[placement.host_index]}: {error.strerror or error}"
    return Connections(), reason


def _all_gather_json(store: Any, key: str, rank: int, size: int, value: Any) -> list[Any]:
    """Return the ``value`` of every rank."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(text) for text in store.multi_get([f"{key}/{r}" for r in range(size)])]


def _same_algorithm(requested: list[str], known: list[str], names: Sequence[int]) -> str:
    for rank, name in enumerate(requested):
        if name != CHEAPEST and name not in known:
            racks = (
                f" ({schedules.RACKS} only if {RACKS_VARIABLE} describes racks with the same "
                "number of nodes)"
            )
            note = "" if schedules.RACKS in known else racks
            raise ValueError(
                f"{ALGORITHM_VARIABLE} must be one of {', '.join(known)}{note}; this is {name}. "
                f"HINT: {ALGORITHM_VARIABLE}={known[0]}, or unset it for the algorithm of the "
                "lowest cost"
            )
        if name != requested[0]:
            first, other = (names[0], names[rank]) if names else (0, rank)
            raise ValueError(
                f"{ALGORITHM_VARIABLE} must be the same on all ranks; it is {requested[0]} on rank "
                f"{first} and {name} on rank {other}. HINT: paceline run --env "
                f"{ALGORITHM_VARIABLE}={requested[0]}"
            )
    return requested[0]


def record(recorder: Recorder) -> None:
    """Set the recorder of the groups that are created from now on."""
    global _recorder
    _recorder = recorder


def create(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    """Create a group for ``init_process_group("paceline")`` and ``new_group``.

    paceline/__init__.py registers this function with torch.
    """
    recorder = _recorder
    replica_check.look()
    options.store = store_of_use(options.store, options.group_size)
    if recorder is None or not recorder.enabled:
        return _faster(_plain_group(options), options)
    key = announce_check(options.store, str(options.group_id))
    group = _plain_group(options)
    measure_wrapper_cost(recorder)
    checks = make_check(group, options.store, key)
    return RecordedGroup(_faster(group, options), str(options.group_id), recorder, checks)


def store_of_use(store: Any, size: int) -> PrefixStore:
    """Return a store of this use alone: groups of other members may use one in succession.

    Otherwise a rank would find addresses of the group before. All members come before one of them
    creates the next group.
    """
    kind = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"
    return PrefixStore(f"{kind}/{(store.add(kind, 1) - 1) // size}", store)


def _faster(group: dist.ProcessGroup, options: Any) -> dist.ProcessGroup:
    """Return the group over shared memory if possible, else the group itself.

    It passes the tensors of GPUs on to NCCL.

    Each reason for the fallback is printed once, unless the user has disabled shared memory.
    """
    store = PrefixStore("shared/", options.store)
    group, why = over_memory(group, store, options.timeout, options.global_ranks_in_group)
    if why not in ("", DISABLED_BY_USER) and group.rank() == 0:
        _warn_fallback(why)
    return group


@functools.cache
def _warn_fallback(reason: str) -> None:
    notify(f"paceline: ranks exchange through gloo: {reason}\n")


def over_memory(
    group: dist.ProcessGroup, store: Any, timeout: timedelta, names: Sequence[int] = ()
) -> tuple[dist.ProcessGroup, str]:
    """Return the group with CPU collectives over shared memory, and an empty string.

    Between hosts, collectives use the hierarchy on top of shared memory. If neither is possible,
    return the unchanged group and the reason.

    Args:
        timeout: Time that a rank waits for another one in a collective; 0 for no limit, as in gloo.
        names: Global ranks of the group's members.
    """
    seconds = min(timeout or MAX_TIMEOUT, MAX_TIMEOUT).total_seconds()
    kernel: Any
    kernel, why = open_kernel(store, group.rank(), group.size(), seconds, names)
    if why == ON_SEVERAL_HOSTS:
        between = PrefixStore("hosts/", store)
        kernel, why = open_hierarchy(between, group.rank(), group.size(), seconds, names)
    if kernel is None:
        return group, why
    update_all_headers(exchange=NAME)
    messages = None
    if isinstance(kernel, CKernel | TorchKernel):  # all ranks are on this node
        ranks = list(names) or list(range(group.size()))
        shared = PrefixStore("messages/", store)
        messages = Messages(shared, group.rank(), ranks, kernel.is_alive, seconds, _step)
    return SharedMemoryGroup(group, kernel, seconds, _step, messages), ""


def _step() -> str:
    """Return the prefix of error messages: the current step, or empty without a recorder."""
    return f"step {_recorder.step}: " if _recorder is not None and _recorder.enabled else ""


def _plain_group(options: Any) -> dist.ProcessGroup:
    """Create the group that ``init_process_group("cpu:gloo,cuda:nccl")`` would create."""
    rank, size = options.group_rank, options.group_size
    timeout = min(options.timeout, MAX_TIMEOUT)
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = connect_gloo(
        lambda store: dist.ProcessGroupGloo(store, rank, size, timeout=timeout),
        PrefixStore("gloo/", options.store),
        rank,
        size,
    )
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options: Any = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout or MAX_TIMEOUT  # 0 is no limit for gloo, and none for NCCL
        nccl_options.is_high_priority_stream = False
        # by which NCCL's watchdog and its flight recorder name the group
        nccl_options.global_ranks_in_group = list(options.global_ranks_in_group)
        nccl_options.group_name = options.group_id
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, nccl_options)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(options.group_id)
    return group
