"""The transport: blocking collectives of one process set, by torch.distributed.

Tensors are buffers here: contiguous, without gradients. With one rank nothing is exchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....comm.group_device import all_gather_flat, exchangeable, reduce_scatter_flat
from ....comm.members.exchange_objects import all_gather_objects
from ....comm.shared_memory_group import SharedMemoryGroup
from ....plurals import named_ranks
from ....record.hooks.collective_in_flight import CollectiveInFlight
from ....record.hooks.collectives import RecordedGroup
from ....record.ring.launcher_messages import notify
from ....record.ring.recorder import now
from ....record.ring.states import Op
from ....world.process_group import gpu_identifier
from .negotiation import Message
from .requests import ReduceOp

_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


class Exchange:
    """The collectives of one process set.

    Tensors of GPUs are exchanged through copies in the memory of the host where ranks share a GPU,
    which NCCL refuses, and where PyTorch has no NCCL. The copies are ordered by the current stream,
    and the host waits for them.

    Collectives of CPU tensors are recorded as of the training, whichever thread runs them: launched
    when this rank was ready for them. Those of NCCL are recorded as any others.

    Args:
        group: Process group of torch.distributed; None for a set of one rank.
        rank: Index of this rank among ``members``.
        members: Global ranks.

    Attributes:
        launched_ns: When this rank was ready for the next collective (CLOCK_MONOTONIC); 0 if it has
            joined.
    """

    def __init__(self, group: Any, rank: int, members: Sequence[int]) -> None:
        self.group, self.rank, self.members = group, rank, list(members)
        self.size = len(self.members)
        self.launched_ns = 0
        self._waits = RecordedWaits(group) if isinstance(group, RecordedGroup) else None
        self._shares_gpu: bool | None = None  # unknown before the first tensor on a GPU

    @property
    def _plain(self) -> Any:
        return unrecorded(self.group)

    def begin_wait(self) -> None:
        """Note that this thread begins to wait for an operation."""
        if self._waits is not None:
            self._waits.begin()

    def end_wait(self) -> None:
        """Note that this thread has waited."""
        if self._waits is not None:
            self._waits.end()

    def divides(self, tensor: torch.Tensor) -> bool:
        """Return whether ``all_reduce`` supports AVERAGE for this tensor."""
        if not tensor.is_floating_point():
            return False
        if self.size == 1 or isinstance(self._plain, SharedMemoryGroup):
            return True
        return tensor.device.type != "cpu" and not self._needs_host(tensor)

    def barrier(self) -> None:
        """Record a barrier: that all ranks have submitted it is all that it does."""
        self._run(Op.BARRIER, None, 0, lambda _: None)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce in place.

        Elements are exchanged in the order of their indices, because the ranks' tensors may have
        different memory formats.
        """
        if self.size > 1:
            buffer = self._exchangeable(tensor).contiguous()
            if self._needs_wider(buffer):
                buffer = buffer.int()
            self._run(
                Op.ALL_REDUCE,
                buffer,
                buffer.nbytes,
                lambda group: all_reduce(group, buffer, _OPS[op]),
            )
            if buffer is not tensor:
                tensor.copy_(buffer)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank. All ranks have as many."""
        if self.size == 1:
            return [list(numbers)]
        own = exchangeable(torch.tensor(numbers, dtype=torch.int64), self.group)
        rows = own.new_empty(self.size * len(own))
        all_gather_flat(rows, own, group=self._plain)
        return [list(map(int, row)) for row in rows.view(self.size, -1).tolist()]

    def all_gather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated.

        rows: of each rank, in the first dimension.
        """
        if self.size == 1:
            return tensor.clone()
        device, tensor = tensor.device, self._exchangeable(tensor)
        most, shape = max(rows), tensor.shape[1:]
        padded = tensor
        if rows[self.rank] < most:
            padded = tensor.new_zeros((most, *shape))
            padded[: rows[self.rank]] = tensor
        gathered = tensor.new_empty((self.size * most, *shape))
        self._run(
            Op.ALL_GATHER,
            tensor,
            gathered.nbytes,
            lambda group: (
                gathered.numel()
                and all_gather_flat(as_bytes(gathered), as_bytes(padded), group=group)
            ),
        )
        if min(rows) == most:
            return gathered.to(device)
        each = gathered.view(self.size, most, *shape)
        return torch.cat([each[at, :count] for at, count in enumerate(rows)]).to(device)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the tensor by that of the global rank ``root``."""
        if self.size > 1:
            index, buffer = self.members.index(root), self._exchangeable(tensor)
            self._run(
                Op.BROADCAST,
                buffer,
                buffer.nbytes,
                lambda group: (
                    buffer.numel()
                    and dist.broadcast(as_bytes(buffer), group=group, group_src=index)
                ),
                index,
            )
            if buffer is not tensor and index != self.rank:
                tensor.copy_(buffer)

    def all_to_all(
        self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
    ) -> torch.Tensor:
        """Send rows of the tensor to each rank; return the received rows, in rank order."""
        sent = tensor[: sum(sent_rows)].contiguous()
        if self.size == 1:
            return sent.clone()
        sent = self._exchangeable(sent)
        received = sent.new_empty((sum(received_rows), *tensor.shape[1:]))
        self._run(
            Op.ALL_TO_ALL,
            sent,
            sent.nbytes,
            lambda group: dist.all_to_all_single(
                received, sent, list(received_rows), list(sent_rows), group=group
            ),
        )
        return received.to(tensor.device)

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduce, and return this rank's rows; the first ranks have one more if it is uneven."""
        if self.size == 1:
            return tensor.clone()
        if self._needs_wider(tensor):
            return self.reduce_scatter(tensor.int(), op).to(tensor.dtype)
        device, tensor = tensor.device, self._exchangeable(tensor)
        most, more = divmod(tensor.shape[0], self.size)
        counts = [most + (rank < more) for rank in range(self.size)]
        longest = most + bool(more)
        padded = tensor
        if more:
            padded = tensor.new_zeros((self.size, longest, *tensor.shape[1:]))
            for part, rows in zip(padded, tensor.split(counts), strict=True):
                part[: len(rows)] = rows
        own = tensor.new_empty((longest, *tensor.shape[1:]))
        self._run(
            Op.REDUCE_SCATTER,
            tensor,
            tensor.nbytes,
            lambda group: (
                own.numel()
                and reduce_scatter_flat(own.view(-1), padded.reshape(-1), _OPS[op], group=group)
            ),
        )
        return own[: counts[self.rank]].to(device)

    def swap(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Exchange equally large tensors with a rank of the set (an index); return its tensor."""
        sent, other = self._exchangeable(tensor), self.members[peer]
        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, other, self.group),
                dist.P2POp(dist.irecv, received, other, self.group),
            ]
        )
        for work in works:
            work.wait()
        return received.to(tensor.device)

    def _needs_wider(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is reduced as int32: gloo and NCCL do not reduce int16."""
        is_shared = tensor.device.type == "cpu" and isinstance(self._plain, SharedMemoryGroup)
        return tensor.dtype == torch.int16 and not is_shared

    def _exchangeable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a copy in the memory of the host."""
        return tensor.cpu() if self._needs_host(tensor) else tensor

    def _needs_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is exchanged through the host's memory, the same on all ranks.

        Collective with the first tensor on a GPU: the GPU that a script uses is not known before.
        """
        if tensor.device.type == "cpu":
            return False
        if tensor.device.type not in [device.type for device in self._plain._device_types]:
            return True
        if self._shares_gpu is None:
            own = gpu_identifier(tensor.device)
            self._shares_gpu = self._find_shared_gpu(all_gather_objects(own, str, self._plain))
        return self._shares_gpu

    def _find_shared_gpu(self, identifiers: Sequence[str]) -> bool:
        """Return whether ranks have the same GPU, and report it.

        identifiers: of the GPU of each rank; "" if unknown.
        """
        by_gpu: dict[str, list[int]] = {}
        for member, identifier in zip(self.members, identifiers, strict=True):
            if identifier:
                by_gpu.setdefault(identifier, []).append(member)
        shared = [ranks for ranks in by_gpu.values() if len(ranks) > 1]
        if shared and self.rank == 0:
            _report_shared_gpu(f"{named_ranks(shared[0])} share a GPU")
        return bool(shared)

    def _run(
        self,
        op: Op,
        tensor: torch.Tensor | None,
        amount: int,
        call: Callable[[Any], Any],
        peer: int = -1,
    ) -> None:
        """Call a function with the process group, and record it as a collective.

        Args:
            tensor: One of its tensors.
            amount: Its bytes.
            peer: Index of the root.
        """
        if self._waits is None or (tensor is not None and tensor.device.type != "cpu"):
            call(self.group)
            return
        call(self._plain)
        self._waits.note(op, amount, self.launched_ns, peer)


@functools.cache
def _report_shared_gpu(reason: str) -> None:
    notify(
        "paceline: Horovod's operations on GPU tensors go through the memory of the host, because "
        f"{reason}, which NCCL refuses. HINT: start at most one rank for each GPU\n"
    )


class RecordedWaits:
    """Waits of the training thread for operations, in terms of the collectives that they needed."""

    def __init__(self, group: RecordedGroup) -> None:
        self._group = group
        self._since: int | None = None  # start of the wait of the training thread
        self._ended: list[tuple[CollectiveInFlight, int]] = []  # meanwhile, with their ends

    def begin(self) -> None:
        start = now()
        if self._group.begin_next_wait(Op.ALL_REDUCE, start):
            self._ended.clear()
            self._since = start

    def note(self, op: Op, amount: int, launched: int, peer: int) -> None:
        """Record a collective that has just ended, in any thread."""
        end = now()
        # a rank that has joined is ready for all collectives of the others
        launched = launched or self._since or end
        in_flight = self._group.note_exchange(op, amount, launched, end, peer)
        if in_flight is not None and self._since is not None:
            self._ended.append((in_flight, end))

    def end(self) -> None:
        """Record the wait of the training thread, if this is its end.

        It is recorded by the training thread, whose core time is read with it.
        """
        start = self._since
        if start is None or not self._group.trains_here():
            return
        self._since = None
        ended, self._ended = self._ended, []
        for at, (in_flight, end) in enumerate(ended):
            end = now() if at == len(ended) - 1 else end
            in_flight.end_wait(start, end, in_background=False)
            start = end


class GroupMeetings:
    """How the ranks of a process set meet: by collectives of its group, which are not recorded."""

    def __init__(self, group: Any) -> None:
        self._recorded = group
        self._bytes = bytearray()
        self._tensor = torch.empty(0, dtype=torch.uint8)

    @property
    def _group(self) -> Any:
        return unrecorded(self._recorded)

    def minimum(self, vector: bytearray) -> None:
        """Replace each byte of the vector by the smallest of all ranks."""
        if len(vector) != len(self._bytes):
            self._bytes = bytearray(len(vector))
            self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._bytes[:] = vector
        group = self._group
        sent = exchangeable(self._tensor, group)
        all_reduce(group, sent, dist.ReduceOp.MIN)
        if sent is not self._tensor:
            self._tensor.copy_(sent)
        vector[:] = self._bytes

    def gather(self, message: Message) -> list[Message]:
        """Return the messages of all ranks."""
        return all_gather_objects(message, Message, self._group)

    def limit(self, seconds: float) -> None:
        """Set the time that the next meetings wait for late ranks."""
        group = self._group
        if isinstance(group, SharedMemoryGroup):
            group.timeout = seconds

    def abort(self) -> None:
        """End the meeting in which another thread waits, with an error, if that is possible."""
        break_group = getattr(getattr(self._group, "kernel", None), "break_group", None)
        if break_group is not None:  # the other kernels and gloo can't be interrupted
            break_group()


def all_reduce(group: Any, tensor: torch.Tensor, op: Any) -> None:
    """All-reduce in place, without what dist.all_reduce does in addition, and wait."""
    if isinstance(group, SharedMemoryGroup) and group.reduce_now(tensor, op):
        return
    work = group.allreduce([tensor], _all_reduce_options(op))
    if work is not None:
        work.wait()


@functools.cache
def _all_reduce_options(op: Any) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = False
    return options


def unrecorded(group: Any) -> Any:
    """Return the group below the recording of collectives.

    Call it at each use: an experiment of ``paceline diagnose`` replaces the group.
    """
    return group.inner if isinstance(group, RecordedGroup) else group


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as bytes, so that every dtype can be copied."""
    return tensor.view(-1).view(torch.uint8)
