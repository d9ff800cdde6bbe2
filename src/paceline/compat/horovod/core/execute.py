"""Execute operations that all ranks have submitted, in the same order on all of them.

All-reduces of the same kind are fused: small tensors are copied into one buffer, large ones are
reduced where they are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from .. import timeline
from . import adasum
from .device_streams import DeviceStreams
from .exchange import Exchange
from .operation import Operation
from .requests import UNEVEN_KINDS, Kind, ReduceOp, Request

BUCKET = "FUSED_ALLREDUCE"  # name in the timeline
# From this size on a copy into the fusion buffer costs more than another collective.
UNFUSED_BYTES = 256 << 10
# Fusion buffers of the last buckets are used again for the same ones; not those on a GPU, where a
# rank that has joined uses another stream.
MAX_FUSION_BUFFERS, REUSED_BYTES = 4, 16 << 20
Ready = tuple[Request, Operation | None]


@dataclass
class Bucket:
    """All-reduced tensors that are exchanged together.

    Attributes:
        request: Of the first of them, for reduction and factors.
        tensors: Buffers of input and result.
        submitted_ns: When each was submitted; 0 on a rank that has joined.
    """

    request: Request
    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    submitted_ns: list[int] = field(default_factory=list)
    nbytes: int = 0


class Executor:
    """Executes operations of one process set on this rank.

    Args:
        fusion_bytes: Largest bucket.
        fuses_groups: Whether grouped operations share buckets with others.
    """

    def __init__(self, exchange: Exchange, fusion_bytes: int, fuses_groups: bool) -> None:
        self.exchange = exchange
        self._streams = DeviceStreams()
        self.fusion_bytes, self.fuses_groups = fusion_bytes, fuses_groups
        self._buffers: dict[Any, FusionBuffer] = {}  # the oldest first

    def begin_wait(self) -> None:
        self.exchange.begin_wait()

    def end_wait(self) -> None:
        self.exchange.end_wait()

    def prepare(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.request.device != "cpu":
                self._streams.note_submission(operation)

    def follow(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.event is not None:
                self._streams.follow(operation)

    def __call__(self, ready: Sequence[Ready]) -> None:
        with self._streams.exchange([one for _, one in ready if one is not None]):
            self._execute(ready)

    def _execute(self, ready: Sequence[Ready]) -> None:
        reductions = [one for one in ready if one[0].kind is Kind.ALLREDUCE]
        for bucket in self._buckets(reductions):
            begun_ns = time.monotonic_ns()
            self._reduce(bucket)
            if timeline.active is not None:
                now, count = time.monotonic_ns(), len(bucket.names)
                for name in dict.fromkeys(bucket.names):
                    timeline.active.slice(name, BUCKET, begun_ns, now, tensors=count)
        if len(reductions) == len(ready):
            return
        own = [one for _, one in ready if one is not None]
        uneven = [one for one in own if one.request.kind in UNEVEN_KINDS]
        if uneven:
            self._exchange_rows(uneven)
        for operation in own:
            self.exchange.launched_ns = operation.submitted_ns
            if operation.request.kind is Kind.BROADCAST:
                self._broadcast(operation)
            elif operation.request.kind is Kind.REDUCESCATTER:
                self._reduce_scatter(operation)
            elif operation.request.kind is Kind.BARRIER:
                self.exchange.barrier()

    def _buckets(self, ready: Sequence[Ready]) -> list[Bucket]:
        """Return buckets, in an order that depends only on what is equal on all ranks."""
        buckets: list[Bucket] = []
        open_buckets: dict[Any, Bucket] = {}
        for request, operation in ready:
            alone = len(request.shapes) > 1 and not self.fuses_groups
            submitted_ns = operation.submitted_ns if operation is not None else 0
            for at, dtype in enumerate(request.dtypes):
                tensor = _own_tensor(request, operation, at)
                key = (request.fusion_key, dtype, request.name if alone else "")
                nbytes, bucket = tensor.nbytes, open_buckets.get(key)
                if bucket is None or (bucket.nbytes + nbytes > self.fusion_bytes and not alone):
                    bucket = open_buckets[key] = Bucket(request)
                    buckets.append(bucket)
                bucket.tensors.append(tensor)
                bucket.names.append(request.name)
                bucket.submitted_ns.append(submitted_ns)
                bucket.nbytes += nbytes
        return buckets

    def _reduce(self, bucket: Bucket) -> None:
        request = bucket.request
        if request.prescale != 1:
            for tensor in bucket.tensors:
                scale(tensor, request.prescale)
        small: list[torch.Tensor] = []
        small_ns = 0
        for tensor, submitted_ns in zip(bucket.tensors, bucket.submitted_ns, strict=True):
            if tensor.nbytes < UNFUSED_BYTES:
                small.append(tensor)
                small_ns = max(small_ns, submitted_ns)
            else:
                self.exchange.launched_ns = submitted_ns
                self._reduce_flat(tensor, [tensor], request.op)
        self.exchange.launched_ns = small_ns
        if len(small) == 1:
            self._reduce_flat(small[0], small, request.op)
        elif small:
            buffer = self._fusion_buffer(small)
            torch._foreach_copy_(buffer.parts, small)
            self._reduce_flat(buffer.flat, buffer.parts, request.op)
            torch._foreach_copy_(small, buffer.parts)
        if request.postscale != 1:
            for tensor in bucket.tensors:
                scale(tensor, request.postscale)

    def _fusion_buffer(self, tensors: list[torch.Tensor]) -> "FusionBuffer":
        key = (tensors[0].dtype, tensors[0].device, *[one.shape for one in tensors])
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = FusionBuffer(tensors)
            if buffer.flat.is_cpu and buffer.flat.nbytes <= REUSED_BYTES:
                if len(self._buffers) == MAX_FUSION_BUFFERS:
                    del self._buffers[next(iter(self._buffers))]
                self._buffers[key] = buffer
        return buffer

    def _reduce_flat(self, flat: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """Reduce a buffer in place. parts: the tensors in it."""
        if op == ReduceOp.ADASUM:
            adasum.reduce_tensors(self.exchange, parts)
        elif op == ReduceOp.AVERAGE and not self.exchange.divides(flat):
            self.exchange.all_reduce(flat, ReduceOp.SUM)
            divide(flat, self.exchange.size)
        else:
            self.exchange.all_reduce(flat, op)

    def _exchange_rows(self, operations: Sequence[Operation]) -> None:
        """Execute all-gathers and all-to-alls, whose tensors may differ in rows between ranks."""
        if not operations:
            return
        numbers: list[int] = []
        for operation in operations:
            numbers += operation.splits or [len(one) for one in operation.inputs]
        table = self.exchange.all_gather_numbers(numbers)
        at = 0
        for operation in operations:
            operation.outputs = []
            self.exchange.launched_ns = operation.submitted_ns
            if operation.splits is not None:
                received = [row[at + self.exchange.rank] for row in table]
                operation.received_splits = received
                at += self.exchange.size
                operation.outputs.append(
                    self.exchange.all_to_all(operation.inputs[0], operation.splits, received)
                )
                continue
            for tensor in operation.inputs:
                rows = [row[at] for row in table]
                at += 1
                operation.outputs.append(self.exchange.all_gather(tensor, rows))

    def _broadcast(self, operation: Operation) -> None:
        assert operation.outputs is not None
        for source, output in zip(operation.inputs, operation.outputs, strict=True):
            flat = source.contiguous()
            if self.exchange.members[self.exchange.rank] != operation.request.root:
                flat = torch.empty_like(flat) if output is not source else flat
            self.exchange.broadcast(flat, operation.request.root)
            if flat is not output:
                output.copy_(flat)

    def _reduce_scatter(self, operation: Operation) -> None:
        request, operation.outputs = operation.request, []
        for tensor in operation.inputs:
            source = tensor
            if request.prescale != 1:
                source = tensor.clone()
                scale(source, request.prescale)
            op = request.op
            divides = op != ReduceOp.AVERAGE or self.exchange.divides(source)
            result = self.exchange.reduce_scatter(source, op if divides else ReduceOp.SUM)
            if not divides:
                divide(result, self.exchange.size)
            scale(result, request.postscale)
            operation.outputs.append(result)


class FusionBuffer:
    """A buffer for tensors of one dtype and device, which are reduced together.

    Attributes:
        flat: The buffer; ``parts``: its views in the shapes of the tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.flat = tensors[0].new_empty(sum(one.numel() for one in tensors))
        self.parts: list[torch.Tensor] = list(_unflatten_dense_tensors(self.flat, tensors))


def _own_tensor(request: Request, operation: Operation | None, at: int) -> torch.Tensor:
    """Return the buffer of an all-reduced tensor, which receives the result as well."""
    if operation is None:  # this rank has joined
        dtype = getattr(torch, request.dtypes[at])
        return torch.zeros(request.shapes[at], dtype=dtype, device=request.device)
    assert operation.outputs is not None
    output: torch.Tensor = operation.outputs[at]
    source = operation.inputs[at]
    if output is not source:
        output.copy_(source)
    return output


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place. Products of integers are rounded towards zero."""
    if factor == 1:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double() * factor)


def divide(tensor: torch.Tensor, number: int) -> None:
    """Divide in place. Quotients of integers are rounded towards zero."""
    if tensor.is_floating_point():
        tensor.div_(number)
    else:
        tensor.div_(number, rounding_mode="trunc")
