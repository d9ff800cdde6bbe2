"""Execute operations that all ranks have submitted, in the same order on all of them.

All-reduces of the same kind are fused: small tensors are copied into one buffer, large ones are
reduced where they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from . import adasum
from .exchange import Exchange
from .operation import Operation
from .requests import Kind, ReduceOp, Request

# From this size on a copy into the fusion buffer costs more than another collective.
UNFUSED_BYTES = 256 << 10
Ready = tuple[Request, Operation | None]


@dataclass
class Bucket:
    """All-reduced tensors that are exchanged together.

    Attributes:
        request: Of the first of them, for reduction and factors.
        pairs: Input and output of each; the output is None before it is made.
    """

    request: Request
    tensors: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0


class Executor:
    """Executes operations of one process set on this rank.

    Args:
        fusion_bytes: Largest bucket.
        fuses_groups: Whether grouped operations share buckets with others.
    """

    def __init__(self, exchange: Exchange, fusion_bytes: int, fuses_groups: bool) -> None:
        self.exchange = exchange
        self.fusion_bytes, self.fuses_groups = fusion_bytes, fuses_groups

    def __call__(self, ready: Sequence[Ready]) -> None:
        with torch.no_grad():
            for bucket in self._buckets(one for one in ready if one[0].kind == Kind.ALLREDUCE):
                self._reduce(bucket)
            self._exchange_rows(
                [
                    operation
                    for request, operation in ready
                    if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL) and operation is not None
                ]
            )
            for request, operation in ready:
                if operation is None:
                    continue
                if request.kind == Kind.BROADCAST:
                    self._broadcast(operation)
                elif request.kind == Kind.REDUCESCATTER:
                    self._reduce_scatter(operation)

    def _buckets(self, ready: Iterable[Ready]) -> Iterator[Bucket]:
        """Yield buckets, in an order that depends only on what is equal on all ranks."""
        buckets: list[Bucket] = []
        open_buckets: dict[Any, Bucket] = {}
        for request, operation in ready:
            alone = len(request.shapes) > 1 and not self.fuses_groups
            for at, dtype in enumerate(request.dtypes):
                tensor = _own_tensor(request, operation, at)
                key = (
                    *(dtype, request.op, request.device, request.prescale, request.postscale),
                    request.name if alone else "",
                )
                bucket = open_buckets.get(key)
                if bucket is None or (
                    bucket.nbytes + tensor.nbytes > self.fusion_bytes and not alone
                ):
                    bucket = open_buckets[key] = Bucket(request)
                    buckets.append(bucket)
                bucket.tensors.append(tensor)
                bucket.nbytes += tensor.nbytes
        yield from buckets

    def _reduce(self, bucket: Bucket) -> None:
        request = bucket.request
        for tensor in bucket.tensors:
            scale(tensor, request.prescale)
        small = [one for one in bucket.tensors if one.nbytes < UNFUSED_BYTES]
        for tensor in bucket.tensors:
            if tensor.nbytes >= UNFUSED_BYTES:
                self._reduce_flat(tensor, [tensor], request.op)
        if len(small) == 1:
            self._reduce_flat(small[0], small, request.op)
        elif small:
            flat = _flatten_dense_tensors(small)
            parts = _unflatten_dense_tensors(flat, small)
            self._reduce_flat(flat, parts, request.op)
            torch._foreach_copy_(small, parts)
        for tensor in bucket.tensors:
            scale(tensor, request.postscale)

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
