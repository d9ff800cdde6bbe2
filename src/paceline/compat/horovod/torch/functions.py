"""Parameters, optimizer states and Python objects of one rank for all ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from .mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    synchronize,
)
from .objects import MAX_OBJECT_BYTES, UNSENDABLE, decode, encode


def broadcast_parameters(
    params: Any, root_rank: int, process_set: Any = global_process_set
) -> None:
    """Give all ranks the tensors of ``root_rank``, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a
            list of tensors or of pairs of name and tensor.

    Raises:
        ValueError: ``params`` is something else, or contains a value that is not a tensor.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | torch.Tensor):
        pairs = [
            one if isinstance(one, tuple) else (f"parameter.{number}", one)
            for number, one in enumerate(params)
        ]
    else:
        raise ValueError(
            f"invalid params of type: {type(params).__name__}. HINT: "
            "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
        )
    for name, value in pairs:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name} is of type {type(value).__name__}, not a tensor. "
                "HINT: hvd.broadcast_object sends other values"
            )
    sent = []
    for name, value in pairs:
        buffer = value.data.contiguous()  # ranks may store a tensor in different orders
        handle = broadcast_async_(buffer, root_rank, f"broadcast.{name}", process_set)
        sent.append((handle, buffer, value.data))
    for handle, buffer, data in sent:
        synchronize(handle)
        if buffer.data_ptr() != data.data_ptr():
            data.copy_(buffer)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: Any = None,  # Horovod takes it, to find sparse parameters
    process_set: Any = global_process_set,
) -> None:
    """Give the optimizers of all ranks the state of that of ``root_rank``.

    Options such as the learning rate have exactly the values of ``root_rank``. An optimizer that
    has not stepped has no state yet, and gets none.

    Raises:
        ValueError: It is torch.optim.LBFGS, or the ranks' optimizers have other parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "cannot broadcast torch.optim.LBFGS state. HINT: "
            "optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict()))"
        )
    if process_set.size() == 1:
        return
    state = broadcast_tree(optimizer.state_dict(), root_rank, "optimizer.state", process_set)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_tree(
    tree: Any, root_rank: int, name: str, process_set: Any = global_process_set
) -> Any:
    """Return the tree of ``root_rank`` on all ranks; its tensors are sent as tensors."""
    leaves, structure = tree_flatten(tree)
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    plain = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
    kinds = {i: (one.dtype, tuple(one.shape), one.is_cuda) for i, one in tensors.items()}
    numbers = tree_unflatten(list(range(len(leaves))), structure)
    numbers, plain, kinds = broadcast_object(
        (numbers, plain, kinds), root_rank, name=name, process_set=process_set
    )
    if rank() != root_rank:
        tensors = {
            i: torch.empty(shape, dtype=dtype, device="cuda" if is_cuda else "cpu")
            for i, (dtype, shape, is_cuda) in kinds.items()
        }
    named = [(f"{name}.{i}", tensor) for i, tensor in sorted(tensors.items())]
    broadcast_parameters(named, root_rank, process_set)
    if rank() == root_rank:
        return tree
    order, received = tree_flatten(numbers)
    return tree_unflatten([tensors[i] if i in tensors else plain[i] for i in order], received)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the object of ``root_rank`` on all ranks.

    Objects of numbers, strings, tensors and containers travel as data, others as pickles, which
    ranks accept under ``paceline run`` only.

    Raises:
        ValueError: On all ranks: the object can't be sent.
    """
    label = name or "broadcast_object"
    if process_set.size() == 1:
        return obj
    is_root = rank() == root_rank
    kind, data = encode(obj) if is_root else (0, b"")
    head = torch.tensor([kind, len(data)])
    broadcast_(head, root_rank, name=f"{label}.size", process_set=process_set)
    kind, length = head.tolist()
    if is_root:
        content = _bytes_tensor(data)
    else:
        content = torch.empty(_checked(length, label), dtype=torch.uint8)
    if length:
        broadcast_(content, root_rank, name=f"{label}.bytes", process_set=process_set)
    if is_root and kind != UNSENDABLE:
        return obj
    return decode(kind, content.numpy().tobytes(), label)


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, by rank. Same rules as for ``broadcast_object``.

    Raises:
        ValueError: On all ranks: the object of a rank can't be sent.
    """
    label = name or "allgather_object"
    if process_set.size() == 1:
        return [obj]
    kind, data = encode(obj)
    heads = allgather(
        torch.tensor([[kind, len(data)]]), name=f"{label}.size", process_set=process_set
    ).tolist()
    lengths = [_checked(length, label) for _, length in heads]
    if sum(lengths):
        gathered = allgather(_bytes_tensor(data), name=f"{label}.bytes", process_set=process_set)
        parts = [one.numpy().tobytes() for one in gathered.split(lengths)]
    else:
        parts = [b""] * len(heads)
    return [
        decode(one, part, f"{label} (rank {process_set.ranks[i]})")
        for i, ((one, _), part) in enumerate(zip(heads, parts, strict=True))
    ]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checked(length: int, label: str) -> int:
    if not 0 <= length <= MAX_OBJECT_BYTES:
        raise ValueError(f"{label}: a rank sends an object of {length:,} bytes")
    return length
