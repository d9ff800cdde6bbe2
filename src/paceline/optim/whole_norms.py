"""Norms of whole tensors, of which ranks may hold shards (``DTensor``) or other parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group_device import exchangeable


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's part on this rank: its shard, or the tensor where it is not sharded."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def holds_shards(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether one of the tensors is sharded over ranks."""
    return any(local_part(tensor) is not tensor for tensor in tensors)


def note_part(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Note that a tensor, or what its shards form, is a part of a whole one.

    Args:
        group: The ranks that hold all parts, each once.
    """
    tensor._paceline_part_group = group  # type: ignore[attr-defined]


def shard_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks over which a tensor is divided, one for each axis."""
    part_group = getattr(tensor, "_paceline_part_group", None)
    own = () if part_group is None else (part_group,)
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return own
    placements = tensor.placements  # type: ignore[attr-defined]
    return (*(mesh.get_group(i) for i, p in enumerate(placements) if _is_shard(p)), *own)


def _is_shard(placement: Any) -> bool:
    """Return whether a placement divides the tensor; FSDP2 over tensor parallel has another kind,
    which PyTorch does not count.
    """
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def whole_norms(
    tensors: Sequence[torch.Tensor], sharded_as: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the L2 norm of each whole tensor. All ranks that hold shards must call this.

    Args:
        tensors: Floating-point tensors, at least one, which may be ``DTensor``s of any mesh.
        sharded_as: Tensors that say how ``tensors`` are divided, if those are local parts.

    Returns:
        float64 tensor [len(tensors)] on the device of the first one, equal on all ranks.
    """
    squares = _norms([local_part(tensor) for tensor in tensors]).square()
    groups = [shard_groups(tensor) for tensor in sharded_as or tensors]
    for of in dict.fromkeys(groups):
        at = [i for i, found in enumerate(groups) if found == of]
        for group in of:
            sums = exchangeable(squares[at], group)
            dist.all_reduce(sums, group=group)
            squares[at] = sums.to(squares.device)
    return squares.sqrt()


def _wide(parts: list[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of the norms of 16-bit tensors, which may exceed the largest float16."""
    is_half = any(part.dtype in (torch.float16, torch.bfloat16) for part in parts)
    return torch.float32 if is_half and all(p.dtype != torch.float64 for p in parts) else None


def _norms(parts: list[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(parts, 2, _wide(parts))
    if len({(norm.dtype, norm.device) for norm in norms}) == 1:
        return torch.stack(norms).double()
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
