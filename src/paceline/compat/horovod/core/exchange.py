"""The transport: blocking collectives of one process set, by torch.distributed.

Tensors are buffers here: contiguous, without gradients. With one rank nothing is exchanged.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....comm.group_device import exchangeable
from ....comm.members.exchange_objects import all_gather_objects
from ....comm.shared_memory_group import SharedMemoryGroup
from ....record.hooks.collectives import RecordedGroup
from .negotiation import Message
from .requests import ReduceOp

_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.AVG,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# Newer versions of torch have other names for them, and warn about these.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Exchange:
    """The collectives of one process set.

    Args:
        group: Process group of torch.distributed; None for a set of one rank.
        rank: Index of this rank among ``members``.
        members: Global ranks.
    """

    def __init__(self, group: Any, rank: int, members: Sequence[int]) -> None:
        self.group, self.rank, self.members = group, rank, list(members)
        self.size = len(self.members)

    def divides(self, tensor: torch.Tensor) -> bool:
        """Return whether ``all_reduce`` supports AVERAGE for this tensor."""
        if not tensor.is_floating_point():
            return False
        if tensor.device.type != "cpu":
            return True
        return self.size == 1 or isinstance(unrecorded(self.group), SharedMemoryGroup)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce in place."""
        if self.size > 1:
            dist.all_reduce(tensor, _OPS[op], group=self.group)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank. All ranks have as many."""
        if self.size == 1:
            return [list(numbers)]
        own = exchangeable(torch.tensor(numbers, dtype=torch.int64), self.group)
        rows = own.new_empty(self.size * len(own))
        _all_gather(rows, own, group=self.group)
        return [list(map(int, row)) for row in rows.view(self.size, -1).tolist()]

    def all_gather(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated.

        rows: of each rank, in the first dimension.
        """
        if self.size == 1:
            return tensor.clone()
        most, shape = max(rows), tensor.shape[1:]
        padded = tensor
        if rows[self.rank] < most:
            padded = tensor.new_zeros((most, *shape))
            padded[: rows[self.rank]] = tensor
        gathered = tensor.new_empty((self.size * most, *shape))
        if gathered.numel():
            _all_gather(*map(as_bytes, (gathered, padded)), group=self.group)
        if min(rows) == most:
            return gathered
        each = gathered.view(self.size, most, *shape)
        return torch.cat([each[at, :count] for at, count in enumerate(rows)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the tensor by that of the global rank ``root``."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(as_bytes(tensor), root, group=self.group)

    def all_to_all(
        self, tensor: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]
    ) -> torch.Tensor:
        """Send rows of the tensor to each rank; return the received rows, in rank order."""
        sent = tensor[: sum(sent_rows)]
        if self.size == 1:
            return sent.clone()
        received = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
        dist.all_to_all_single(
            received, sent.contiguous(), list(received_rows), list(sent_rows), group=self.group
        )
        return received

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduce, and return this rank's rows; the first ranks have one more if it is uneven."""
        most, more = divmod(tensor.shape[0], self.size)
        counts = [most + (rank < more) for rank in range(self.size)]
        if self.size == 1:
            return tensor.clone()
        longest = most + bool(more)
        padded = tensor
        if more:
            padded = tensor.new_zeros((self.size, longest, *tensor.shape[1:]))
            for part, rows in zip(padded, tensor.split(counts), strict=True):
                part[: len(rows)] = rows
        own = tensor.new_empty((longest, *tensor.shape[1:]))
        if own.numel():
            _reduce_scatter(own.view(-1), padded.reshape(-1), _OPS[op], group=self.group)
        return own[: counts[self.rank]]

    def swap(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Exchange equally large tensors with a rank of the set (an index); return its tensor."""
        received, other = torch.empty_like(tensor), self.members[peer]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, other, self.group),
                dist.P2POp(dist.irecv, received, other, self.group),
            ]
        )
        for work in works:
            work.wait()
        return received


class GroupMeetings:
    """Meetings by collectives of the process set's group, which are not recorded."""

    def __init__(self, group: Any) -> None:
        self._group = unrecorded(group)

    def minimum(self, vector: bytearray) -> None:
        own = torch.frombuffer(vector, dtype=torch.uint8)
        tensor = exchangeable(own, self._group)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        if tensor is not own:
            own.copy_(tensor)

    def gather(self, message: Message) -> list[Message]:
        return all_gather_objects(message, Message, self._group)

    def limit(self, seconds: float) -> None:
        if isinstance(self._group, SharedMemoryGroup):
            self._group.timeout = seconds


def unrecorded(group: Any) -> Any:
    """Return the group below the recording of collectives."""
    return group.inner if isinstance(group, RecordedGroup) else group


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as bytes, so that every dtype can be copied."""
    return tensor.view(-1).view(torch.uint8)
