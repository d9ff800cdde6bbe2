"""Submit operations on tensors, and wait for them: the part that all operations share."""

import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import world
from ..core.coordinator import Coordinator
from ..core.process_sets import ProcessSet
from ..core.requests import NO_ROOT, Kind, Operation, ReduceOp, Request
from .basics import Average, Sum

_last_handle = itertools.count(1)
_handles: dict[int, tuple[Coordinator, Operation, Callable[[Operation], Any]]] = {}
_requests: dict[Any, Request] = {}  # of calls with a name, which scripts repeat
MAX_REQUESTS = 8192
_this_thread = threading.local()  # waits: whether it waits for what it submits next
_NOT_REDUCED = frozenset((torch.bool, torch.complex64, torch.complex128))


def reduce_op(op: Any, average: bool | None) -> ReduceOp:
    """Return the reduction of the arguments ``op`` and ``average`` (deprecated)."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0. HINT: "
            "op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"op={op!r} is not a reduction. HINT: hvd.Average, hvd.Sum, hvd.Min, hvd.Max, "
            "hvd.Product or hvd.Adasum"
        ) from None


def coordinator_of(process_set: ProcessSet) -> Coordinator:
    """Return the coordinator of a process set.

    Raises:
        HorovodInternalError: Before ``init``.
        ValueError: This rank is not in the set, or the set is not registered.
    """
    return world.world_of_operations().coordinator_of(process_set)


def submit(
    coordinator: Coordinator, operation: Operation, result: Callable[[Operation], Any]
) -> int:
    """Submit an operation and return its handle.

    result: returns what ``synchronize`` returns.
    """
    coordinator.submit([operation], getattr(_this_thread, "waits", False))
    handle = next(_last_handle)
    _handles[handle] = (coordinator, operation, result)
    return handle


def poll(handle: Any) -> bool:
    """Return whether ``synchronize(handle)`` returns without waiting."""
    return handle not in _handles or _handles[handle][1].is_done


def synchronize(handle: Any) -> Any:
    """Wait for an operation, and return its result; None for a handle that was waited for before.

    Raises:
        HorovodInternalError: Ranks disagree about the operation, or a rank has ended.
    """
    if callable(handle):
        return handle()
    entry = _handles.pop(handle, None)
    if entry is None:
        return None
    coordinator, operation, result = entry
    coordinator.wait([operation])
    return result(operation)


def run(start: Callable[[], int]) -> Any:
    """Start an operation by a function that returns its handle, wait for it, return its result.

    The background thread is not woken for it.
    """
    _this_thread.waits = True
    try:
        handle = start()
    finally:
        _this_thread.waits = False
    return synchronize(handle)


def outputs_of(grouped: bool, own: list[torch.Tensor] | None = None) -> Callable[[Operation], Any]:
    """Return the function that returns the outputs of an operation, or the only one.

    own: the caller's tensors that receive the outputs, which are returned instead.
    """

    def result(operation: Operation) -> Any:
        outputs = operation.outputs if own is None else own
        assert outputs is not None
        return outputs if grouped else outputs[0]

    return result


def new_request(
    prefix: str,
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    op: ReduceOp = ReduceOp.SUM,
    factors: tuple[float, float] = (1.0, 1.0),
    root: int = NO_ROOT,
) -> Request:
    """Return a request; calls without a name are numbered, separately in each process set."""
    number = process_set.process_set_id
    if name is None:
        unnamed = world.current_world().unnamed
        unnamed[number, prefix] += 1
        unique = f"{prefix}.noname.{unnamed[number, prefix]}"
        return _make_request(unique, kind, tensors, op, factors, root, is_named=False)
    parts = [(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in tensors]
    key = (prefix, name, number, op, factors, root, *parts)
    request = _requests.get(key)
    if request is None:
        if len(_requests) >= MAX_REQUESTS:
            _requests.clear()
        request = _make_request(f"{prefix}.{name}", kind, tensors, op, factors, root)
        _requests[key] = request
    return request


def _make_request(
    name: str,
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    factors: tuple[float, float],
    root: int,
    is_named: bool = True,
) -> Request:
    return Request(
        name,
        kind,
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(str(tensor.dtype)[6:] for tensor in tensors),
        tensors[0].device.type if tensors else "cpu",
        op,
        root,
        float(factors[0]),
        float(factors[1]),
        is_named=is_named,
    )


def checked(prefix: str, tensors: Sequence[Any], reduces: bool = False) -> list[torch.Tensor]:
    """Return the tensors as buffers without gradients.

    Raises:
        ValueError: They can't be exchanged.
    """
    if not tensors:
        raise ValueError(f"{prefix}: the list of tensors is empty. HINT: pass at least one")
    buffers = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{prefix}: {type(tensor).__name__} is not a tensor. HINT: torch.as_tensor(...)"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{prefix}: tensor of layout {tensor.layout}. HINT: hvd.sparse_allreduce_async, or "
                "tensor.to_dense()"
            )
        if reduces and tensor.dtype in _NOT_REDUCED:
            raise ValueError(
                f"{prefix}: Tensor type {tensor.type()} is not supported. HINT: "
                + ("tensor.to(torch.uint8)" if tensor.dtype == torch.bool else "view_as_real")
            )
        if not is_packed(tensor):
            raise ValueError(
                f"{prefix}: Tensor is required to be contiguous, or channel_last. HINT: "
                "tensor.contiguous()"
            )
        buffers.append(tensor.detach() if tensor.requires_grad else tensor)
    devices = [buffer.device for buffer in buffers if not buffer.is_cpu]
    if devices:
        check_devices(prefix, devices, len(devices) < len(buffers))
    return buffers


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one piece of memory."""
    return tensor.is_contiguous() or any(
        tensor.dim() == dims and tensor.is_contiguous(memory_format=layout)
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )


def check_devices(prefix: str, devices: Sequence[torch.device], beside_cpu: bool = False) -> None:
    """Check that a rank exchanges tensors of one GPU only.

    Args:
        devices: GPUs of the tensors of one operation.
        beside_cpu: Whether other tensors of the operation are in the memory of the host.

    Raises:
        ValueError: The tensors are on several devices.
    """
    current = world.world_of_operations()
    if current.device is None:
        current.device = devices[0]
    others = [device for device in devices if device != current.device]
    if others or beside_cpu:
        other = others[0] if others else "the CPU"
        when = "in one operation" if beside_cpu else "on one rank"
        raise ValueError(
            f"{prefix}: tensors of {current.device} and of {other} {when} are not supported. HINT: "
            "torch.cuda.set_device(hvd.local_rank()), and one GPU for each rank"
        )
