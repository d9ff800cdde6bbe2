"""Execute operations that all ranks have submitted, in the same order on all of them.

All-reduces of the same kind are fused: small tensors are copied into one buffer, large ones are
reduced where they are.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from .. import timeline
from . import adasum
from .exchange import Exchange
from .requests import UNEVEN_KINDS, Kind, Operation, ReduceOp, Request

BUCKET = "FUSED_ALLREDUCE"  # name in the timeline
# From this size on a copy into the fusion buffer costs more than another collective.
UNFUSED_BYTES = 256 << 10
# Fusion buffers of the last buckets are used again for the same ones; not those on a GPU, where a
# rank that has joined uses another stream.
MAX_FUSION_BUFFERS, REUSED_BYTES = 4, 16 << 20
MAX_PLANS = 64  # of operations that were ready together, which repeats from step to step
Ready = tuple[Request, Operation | None]


@dataclass
class Bucket:
    """All-reduced tensors that are exchanged together.

    Attributes:
        request: Of the first of them, for reduction and factors.
        small: Tensors that are copied into a fusion buffer; ``large``: the others. A tensor is the
            number of its operation, and its number in that.
        small_key: Dtype, device and shapes of the small ones.
    """

    request: Request
    small: list[tuple[int, int]] = field(default_factory=list)
    large: list[tuple[int, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    small_key: tuple[Any, ...] = ()
    nbytes: int = 0


@dataclass
class Plan:
    """How operations that are ready together are exchanged.

    Attributes:
        requests: Of all operations, which identify the plan.
        buckets: Of the all-reduces.
        others: Numbers of the other operations.
    """

    requests: list[Request]
    buckets: list[Bucket]
    others: list[int]


class Executor:
    """Executes operations of one process set that are ready on all ranks, in the same order.

    Args:
        fusion_bytes: Largest bucket.
        fuses_groups: Whether grouped operations share buckets with others.
    """

    def __init__(self, exchange: Exchange, fusion_bytes: int, fuses_groups: bool) -> None:
        self.exchange = exchange
        self._streams = DeviceStreams()
        self.fusion_bytes, self.fuses_groups = fusion_bytes, fuses_groups
        self._buffers: dict[Any, FusionBuffer] = {}  # the oldest first
        self._plans: dict[Any, Plan] = {}  # by the identities of their requests

    def all_left(self, since_ns: int) -> None:
        """Note that all ranks have left; this one has waited for the others since then."""
        self.exchange.launched_ns = since_ns
        self.exchange.barrier()

    def prepare(self, operations: Sequence[Operation]) -> None:
        """Note that this thread submits operations."""
        for operation in operations:
            if operation.request.device != "cpu":
                self._streams.note_submission(operation)

    def follow(self, operations: Sequence[Operation]) -> None:
        """Note that this thread uses the results of operations next."""
        for operation in operations:
            if operation.event is not None:
                self._streams.follow(operation)

    def __call__(self, ready: Sequence[Ready]) -> None:
        """Execute operations; None stands for one that this rank, which has joined, lacks."""
        if all(one is None or one.event is None for _, one in ready):
            self._execute(ready)
            return
        with self._streams.exchange([one for _, one in ready if one is not None]):
            self._execute(ready)

    def _execute(self, ready: Sequence[Ready]) -> None:
        plan = self._plan_of(ready)
        for bucket in plan.buckets:
            begun_ns = time.monotonic_ns()
            self._reduce(bucket, ready)
            if timeline.active is not None:
                now, count = time.monotonic_ns(), len(bucket.names)
                for name in dict.fromkeys(bucket.names):
                    timeline.active.slice(name, BUCKET, begun_ns, now, tensors=count)
        if not plan.others:
            return
        own = [one for _, one in (ready[at] for at in plan.others) if one is not None]
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

    def _plan_of(self, ready: Sequence[Ready]) -> Plan:
        key = self.fusion_bytes, *[id(request) for request, _ in ready]
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            requests = [request for request, _ in ready]
            others = [at for at, one in enumerate(requests) if one.kind is not Kind.ALLREDUCE]
            plan = self._plans[key] = Plan(requests, self._buckets(requests), others)
        return plan

    def _buckets(self, requests: Sequence[Request]) -> list[Bucket]:
        """Return buckets, in an order that depends only on what is equal on all ranks."""
        buckets: list[Bucket] = []
        open_buckets: dict[Any, Bucket] = {}
        for number, request in enumerate(requests):
            if request.kind is not Kind.ALLREDUCE:
                continue
            alone = len(request.shapes) > 1 and not self.fuses_groups
            for at, (dtype, nbytes) in enumerate(zip(request.dtypes, request.sizes, strict=True)):
                key = (request.fusion_key, dtype, request.name if alone else "")
                bucket = open_buckets.get(key)
                if bucket is None or (bucket.nbytes + nbytes > self.fusion_bytes and not alone):
                    bucket = open_buckets[key] = Bucket(request)
                    bucket.small_key = (dtype, request.device)
                    buckets.append(bucket)
                if nbytes < UNFUSED_BYTES:
                    bucket.small.append((number, at))
                    bucket.small_key += (request.shapes[at],)
                else:
                    bucket.large.append((number, at))
                bucket.names.append(request.name)
                bucket.nbytes += nbytes
        return buckets

    def _reduce(self, bucket: Bucket, ready: Sequence[Ready]) -> None:
        request = bucket.request
        small = [_own_tensor(*ready[number], at) for number, at in bucket.small]
        large = [_own_tensor(*ready[number], at) for number, at in bucket.large]
        if request.prescale != 1:
            for tensor in (*small, *large):
                scale(tensor, request.prescale)
        for (number, _), tensor in zip(bucket.large, large, strict=True):
            self.exchange.launched_ns = _submitted_ns(ready[number])
            self._reduce_flat(tensor, [tensor], request.op)
        if small:
            self.exchange.launched_ns = max(_submitted_ns(ready[at]) for at, _ in bucket.small)
        if len(small) == 1:
            self._reduce_flat(small[0], small, request.op)
        elif small:
            buffer = self._fusion_buffer(small, bucket.small_key)
            torch._foreach_copy_(buffer.parts, small)
            self._reduce_flat(buffer.flat, buffer.parts, request.op)
            torch._foreach_copy_(small, buffer.parts)
        if request.postscale != 1:
            for tensor in (*small, *large):
                scale(tensor, request.postscale)

    def _fusion_buffer(self, tensors: list[torch.Tensor], key: tuple[Any, ...]) -> "FusionBuffer":
        """Return a buffer. key: dtype, device and shapes of the tensors."""
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
            if sum_may_overflow(flat):
                divide(flat, self.exchange.size)
                self.exchange.all_reduce(flat, ReduceOp.SUM)
            else:
                self.exchange.all_reduce(flat, ReduceOp.SUM)
                divide(flat, self.exchange.size)
        else:
            self.exchange.all_reduce(flat, op)

    def _exchange_rows(self, operations: Sequence[Operation]) -> None:
        """Execute all-gathers and all-to-alls, whose tensors may differ in rows between ranks."""
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
            op, source = request.op, tensor
            averages = op == ReduceOp.AVERAGE and not self.exchange.divides(source)
            divides_first = averages and sum_may_overflow(source)
            if divides_first or request.prescale != 1:
                source = tensor.clone()
                scale(source, request.prescale)
            if divides_first:
                divide(source, self.exchange.size)
            result = self.exchange.reduce_scatter(source, ReduceOp.SUM if averages else op)
            if averages and not divides_first:
                divide(result, self.exchange.size)
            scale(result, request.postscale)
            operation.outputs.append(result)


class FusionBuffer:
    """A buffer for tensors of one dtype and device, which are reduced together.

    Attributes:
        flat: The buffer; ``parts``: its views in the shapes of the tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        self.parts: list[torch.Tensor] = list(_unflatten_dense_tensors(self.flat, tensors))


class DeviceStreams:
    """The streams on which one process set exchanges tensors, one for each device.

    A tensor is ready when the stream that was current at its submission has come so far, and the
    stream that is current where its result is waited for goes on after the exchange. The host does
    not wait. Operations of CPU tensors have no events.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def note_submission(self, operation: Operation) -> None:
        """Note how far the current stream has to be before the operation may begin."""
        if operation.inputs[0].is_cuda:
            stream = torch.cuda.current_stream(operation.inputs[0].device)
            operation.event = stream.record_event()

    @contextlib.contextmanager
    def exchange(self, operations: Sequence[Operation]) -> Iterator[None]:
        """Run the body on the exchange's stream, after the submitted tensors are ready."""
        ours = [one for one in operations if one.event is not None]
        if not ours:
            yield
            return
        device = ours[0].inputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        for operation in ours:
            stream.wait_event(operation.event)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
            done = stream.record_event()
        for operation in ours:
            operation.event = done

    def follow(self, operation: Operation) -> None:
        """Let the current stream go on after the operation, whose results it may then use."""
        stream = torch.cuda.current_stream(operation.inputs[0].device)
        stream.wait_event(operation.event)
        for output in operation.outputs or ():
            output.record_stream(stream)  # it may belong to the exchange's stream


def _submitted_ns(one: Ready) -> int:
    """Return when an operation was submitted; 0 on a rank that has joined."""
    return one[1].submitted_ns if one[1] is not None else 0


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


def sum_may_overflow(tensor: torch.Tensor) -> bool:
    """Return whether a sum may overflow where the mean does not, so that it is divided before."""
    return tensor.dtype == torch.float16  # up to 65,504


def divide(tensor: torch.Tensor, number: int) -> None:
    """Divide in place. Quotients of integers are rounded towards zero."""
    if tensor.is_floating_point():
        tensor.div_(number)
    else:
        tensor.div_(number, rounding_mode="trunc")
