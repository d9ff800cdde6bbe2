"""Collectives of a group on several hosts: over shared memory in each host, and between hosts once
for all of its ranks.

An all-reduce is a reduce-scatter in the host, an all-reduce of each part between the ranks that
hold it on all hosts, and an all-gather in the host. Where hosts have different numbers of ranks,
the number of parts is that of the host with the fewest.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from ..shared.c_kernel import CKernel
from ..shared.collective_calls import COLLECTIVES, REDUCTIONS, CollectiveCall, ExchangeError
from ..shared.open_group import SOCKET_REDUCTION
from . import schedules
from .c_wire import Program, StepError, Wire, encode_program
from .failure_agreement import FailureAgreement
from .rank_placement import RankPlacement
from .schedules import ALIGN, LinkModel

SINGLE_RAIL_BYTES = 16 << 10  # up to here only the first rank of each host exchanges
# Additional seconds that a rank waits for another host, so that the ranks of that host report first
# which of them is late; and that a rank waits for one of its own host, which may wait for another
# host.
INTER_HOST_GRACE_S, INTRA_HOST_GRACE_S = 1.0, 4.0
MEAN = REDUCTIONS.index("mean")
CHEAPEST = ""  # the algorithm of the least cost


class HierarchicalKernel:
    """The collectives of one rank, with the interface of shared.c_kernel.CKernel, for all hosts.

    wire: of the ranks that hold a part, else None. link: the slowest of the links between these
    hosts. algorithm: of all-reduces between hosts; it may be changed while no collective is in
    progress. requested_algorithm: as the user has set it; with SOCKET_REDUCTION the cheapest one is
    used between hosts.
    """

    def __init__(
        self,
        placement: RankPlacement,
        kernel: CKernel,
        wire: Wire | None,
        link: LinkModel,
        failure: FailureAgreement,
        algorithm: str = CHEAPEST,
    ) -> None:
        self.placement, self._kernel, self._wire, self._link = placement, kernel, wire, link
        self._failure, self.requested_algorithm = failure, algorithm
        self.algorithm = CHEAPEST if algorithm == SOCKET_REDUCTION else algorithm
        self.rank, self.size = placement.rank, sum(map(len, placement.ranks_by_host))
        self._hosts, self._host_index, self._local_rank = (
            len(placement.ranks_by_host),
            placement.host_index,
            placement.local_rank,
        )
        self._host_ranks = placement.ranks_by_host[self._host_index]

    def all_reduce(
        self, address: int, nbytes: int, dtype: int, reduction: int, timeout: float
    ) -> None:
        """Reduce the vector of all ranks in place."""
        call = CollectiveCall(COLLECTIVES.index("all-reduce"), dtype, reduction, 0, nbytes)
        part, own_bytes = self._part_sizes(nbytes)
        # nothing to reduce in the host; a mean is divided there
        is_alone = len(self._host_ranks) == 1
        with self._agreed_errors(call, timeout):
            if not is_alone or reduction == MEAN:
                self._kernel.reduce_parts(
                    address, nbytes, part, dtype, reduction, self.size, timeout
                )
            if own_bytes:
                self._run_program(
                    self._all_reduce_program(own_bytes),
                    address + self._local_rank * part,
                    call,
                    timeout,
                )
            if not is_alone:
                self._kernel.gather_parts(address, nbytes, part, timeout + INTRA_HOST_GRACE_S)

    def reduce_scatter(
        self,
        sources: Sequence[int],
        destination: int,
        nbytes: int,
        dtype: int,
        reduction: int,
        timeout: float,
    ) -> None:
        """Reduce this rank's vector over all ranks into ``destination``.

        sources: addresses of one vector of ``nbytes`` for each rank.
        """
        if not self.placement.is_uniform:
            self._reduce_scatter_uneven(sources, destination, nbytes, dtype, reduction, timeout)
            return
        call = CollectiveCall(COLLECTIVES.index("reduce-scatter"), dtype, reduction, 0, nbytes)
        padded = -(-nbytes // ALIGN) * ALIGN
        buffer = torch.empty(max(padded * self._hosts, 1), dtype=torch.uint8)
        with self._agreed_errors(call, timeout):
            for host, ranks in enumerate(self.placement.ranks_by_host):
                host_sources = [sources[rank] for rank in ranks]
                host_result = buffer.data_ptr() + host * padded
                self._kernel.reduce_scatter(
                    host_sources, host_result, nbytes, dtype, reduction, timeout, self.size
                )
            cuts = [host * padded for host in range(self._hosts + 1)]
            self._run_program(self._half_program("scatter", cuts), buffer.data_ptr(), call, timeout)
        ctypes.memmove(destination, buffer.data_ptr() + self._host_index * padded, nbytes)

    def all_gather(
        self, source: int, destinations: Sequence[int], nbytes: int, timeout: float
    ) -> None:
        """Gather a vector of ``nbytes`` from each rank.

        destinations: addresses of room for ``nbytes`` of each rank.
        """
        call = CollectiveCall(COLLECTIVES.index("all-gather"), nbytes=nbytes)
        if not self.placement.is_uniform:
            self._all_gather_uneven(source, destinations, nbytes, call, timeout)
            return
        if destinations[self.rank] != source:
            ctypes.memmove(destinations[self.rank], source, nbytes)
        peer_destinations = [
            destinations[ranks[self._local_rank]] for ranks in self.placement.ranks_by_host
        ]
        with self._agreed_errors(call, timeout):
            self._run_program(self._gather_program_at(peer_destinations, nbytes), 0, call, timeout)
            for host, ranks in enumerate(self.placement.ranks_by_host):
                host_destinations = [destinations[rank] for rank in ranks]
                self._kernel.all_gather(
                    peer_destinations[host], host_destinations, nbytes, timeout + INTRA_HOST_GRACE_S
                )

    def broadcast(self, address: int, nbytes: int, root: int, timeout: float) -> None:
        call = CollectiveCall(COLLECTIVES.index("broadcast"), root=root, nbytes=nbytes)
        root_host = next(
            index for index, ranks in enumerate(self.placement.ranks_by_host) if root in ranks
        )
        part, own_bytes = self._part_sizes(nbytes)
        with self._agreed_errors(call, timeout):
            if root_host == self._host_index:
                self._kernel.broadcast(address, nbytes, self._host_ranks.index(root), timeout)
            if own_bytes:
                steps = _program("broadcast", own_bytes, self._host_index, self._hosts, root_host)
                self._run_program(steps, address + self._local_rank * part, call, timeout)
            if root_host != self._host_index:
                self._kernel.gather_parts(address, nbytes, part, timeout + INTRA_HOST_GRACE_S)

    def barrier(self, timeout: float) -> None:
        call = CollectiveCall(COLLECTIVES.index("barrier"))
        with self._agreed_errors(call, timeout):
            self._kernel.barrier(timeout)
            if self._local_rank == 0:
                self._run_program(
                    _program("doubling", 0, self._host_index, self._hosts), 0, call, timeout
                )
            self._kernel.barrier(timeout + INTRA_HOST_GRACE_S)

    @property
    def sockets(self) -> int:
        """Number of sockets of this host (CKernel.sockets)."""
        return self._kernel.sockets

    def use_socket_reduction(self, enabled: bool) -> None:
        """Reduce within sockets first, on every host that has several
        (CKernel.use_socket_reduction).
        """
        self._kernel.use_socket_reduction(enabled)

    def break_group(self) -> None:
        """Fail the group on every rank, from another thread than the one that runs a collective."""
        self._kernel.break_group()

    def close(self) -> None:
        """Release the memory and the connections; the other ranks then see this rank as ended."""
        self._failure.close()
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._kernel.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _part_sizes(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes of each rank's part, and of this rank's."""
        owners = self.placement.num_rails if nbytes > SINGLE_RAIL_BYTES else 1
        part = max(-(-nbytes // (owners * ALIGN)) * ALIGN, ALIGN)
        return part, max(
            min(part, nbytes - self._local_rank * part), 0
        ) if self._local_rank < owners else 0

    def _all_reduce_program(self, nbytes: int) -> Program:
        hosts_per_rack = self.placement.hosts_per_rack
        name = self.algorithm or schedules.cheapest_algorithm(
            nbytes, self._hosts, self._link, hosts_per_rack
        )
        return _program(name, nbytes, self._host_index, self._hosts, hosts_per_rack=hosts_per_rack)

    def _half_program(self, name: str, cuts: list[int]) -> Program:
        return encode_program(_half_steps(name, cuts, self._host_index, self._hosts))

    def _gather_program_at(self, addresses: list[int], nbytes: int) -> Program:
        """Return the all-gather for parts at arbitrary addresses."""
        cuts = [host * nbytes for host in range(self._hosts + 1)]
        address_of = dict(zip(cuts[:-1], addresses, strict=True)) if nbytes else {0: 0}

        def with_addresses(messages: Sequence[schedules.Message]) -> tuple[schedules.Message, ...]:
            return tuple((host, address_of[place], count) for host, place, count in messages)

        steps = _half_steps("gather", cuts, self._host_index, self._hosts)
        return encode_program(
            schedules.Step(with_addresses(step.sends), with_addresses(step.receives))
            for step in steps
        )

    def _reduce_scatter_uneven(
        self,
        sources: Sequence[int],
        destination: int,
        nbytes: int,
        dtype: int,
        reduction: int,
        timeout: float,
    ) -> None:
        """Reduce-scatter where hosts differ in ranks: all-reduce everything, and take this rank's
        part.
        """
        padded = -(-nbytes // ALIGN) * ALIGN
        buffer = torch.zeros(max(padded * self.size, 1), dtype=torch.uint8)
        for rank, source in enumerate(sources):
            ctypes.memmove(buffer.data_ptr() + rank * padded, source, nbytes)
        self.all_reduce(buffer.data_ptr(), padded * self.size, dtype, reduction, timeout)
        ctypes.memmove(destination, buffer.data_ptr() + self.rank * padded, nbytes)

    def _all_gather_uneven(
        self,
        source: int,
        destinations: Sequence[int],
        nbytes: int,
        call: CollectiveCall,
        timeout: float,
    ) -> None:
        """All-gather where hosts differ in ranks: the first rank of each host gathers and
        exchanges.
        """
        order = [rank for ranks in self.placement.ranks_by_host for rank in ranks]
        buffer = torch.empty(max(nbytes * self.size, 1), dtype=torch.uint8)
        addresses = {rank: buffer.data_ptr() + nbytes * place for place, rank in enumerate(order)}
        host_offsets = [order.index(ranks[0]) * nbytes for ranks in self.placement.ranks_by_host]
        with self._agreed_errors(call, timeout):
            host_addresses = [addresses[rank] for rank in self._host_ranks]
            self._kernel.all_gather(source, host_addresses, nbytes, timeout)
            if self._local_rank == 0:
                steps = self._half_program("gather", [*host_offsets, nbytes * self.size])
                self._run_program(steps, buffer.data_ptr(), call, timeout)
            self._kernel.broadcast(
                buffer.data_ptr(), nbytes * self.size, 0, timeout + INTRA_HOST_GRACE_S
            )
        for rank in order:
            ctypes.memmove(destinations[rank], addresses[rank], nbytes)

    def _run_program(
        self, steps: Program, address: int, call: CollectiveCall, timeout: float
    ) -> None:
        assert self._wire is not None
        self._wire.run(steps, address, call, timeout + INTER_HOST_GRACE_S)

    @contextlib.contextmanager
    def _agreed_errors(self, call: CollectiveCall, timeout: float) -> Iterator[None]:
        """Break the group on all hosts at an error, and raise the same error on all ranks."""
        self._failure.raise_if_failed()
        try:
            yield
        except (ExchangeError, StepError) as error:
            agreed = self._failure.agree_on_error(error, call, timeout)
            self._kernel.break_group()
            self._failure.close()
            raise agreed from None


@lru_cache(512)
def _program(
    name: str, nbytes: int, me: int, hosts: int, root: int = 0, hosts_per_rack: int = 0
) -> Program:
    if name == "broadcast":
        return encode_program(schedules.broadcast(nbytes, me, hosts, root))
    return encode_program(schedules.all_reduce(name, nbytes, me, hosts, hosts_per_rack))


def _half_steps(name: str, cuts: list[int], me: int, hosts: int) -> Iterator[schedules.Step]:
    """Return the "scatter" or "gather" steps of an all-reduce."""
    algorithm = "direct" if hosts <= schedules.MAX_DIRECT_HOSTS else "ring"
    steps: Iterator[schedules.Step] = getattr(schedules, f"{algorithm}_{name}")(cuts, me, hosts)
    return steps
