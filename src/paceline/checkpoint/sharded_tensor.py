"""Tensors of which each rank holds a piece: what a rank saves, and reading any other part.

A rank saves the part that it holds, with its offset in the whole tensor. So a checkpoint does not
depend on the layout that wrote it: a rank of another layout, or of another number of ranks, copies
the overlap of its own part with each saved piece. ``DTensor`` says which part a rank holds, by the
protocol that torch.distributed.checkpoint uses.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

import torch

from .checkpoint_folder import populate

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Index = tuple[int, ...]
_MODULE = "torch.distributed.tensor"  # takes long to import, and exists where a DTensor does


class PieceError(ValueError):
    """Pieces that do not form a whole tensor."""


class Piece(TypedDict):
    """Part of a tensor in the shard of one rank.

    Attributes:
        shape: Shape of the whole tensor.
        offset: Position of the first element in the whole tensor.
        tensor: The elements.
    """

    shape: Index
    offset: Index
    tensor: torch.Tensor


def is_piece(value: Any) -> bool:
    """Return whether a value of a file is a piece."""
    if not isinstance(value, dict) or value.keys() != {"shape", "offset", "tensor"}:
        return False
    tensor = value["tensor"]
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return is_index(value["shape"]) and is_index(value["offset"])


def is_index(value: Any) -> bool:
    """Return whether a value of a file is a shape or an offset."""
    return type(value) is tuple and all(type(number) is int and number >= 0 for number in value)


def is_sharded(value: Any) -> "TypeGuard[DTensor]":
    """Return whether the value is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def describe(tensor: "DTensor") -> str:
    """Return shape, dtype and placements: what must be equal on all ranks."""
    mesh, placements = tuple(tensor.device_mesh.shape), tensor.placements
    return f"{tensor.dtype} {tuple(tensor.shape)} over {mesh} {placements}"


def copies_in_mesh(tensor: "DTensor") -> list[int]:
    """Return the ranks of the tensor's mesh that hold this rank's part, by rank.

    [] on a rank that is not in the mesh.
    """
    mesh = tensor.device_mesh
    where = mesh.get_coordinate()
    if where is None:
        return []
    placed = zip(tensor.placements, where, strict=True)
    at = tuple(slice(None) if placement.is_replicate() else index for placement, index in placed)
    ranks = mesh.mesh[at].flatten()
    return sorted(int(rank) for rank in ranks)


Copies = Callable[["DTensor"], list[int]]


def piece_of(
    tensor: "DTensor", path: str = "state", copies: Copies = copies_in_mesh
) -> Piece | None:
    """Return the piece that this rank saves, not copied; None if another replica saves it.

    Args:
        copies: Returns the ranks that hold this rank's part; the first one saves it.

    Raises:
        ValueError: The tensor is a sum that is still to be reduced.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{path} is a DTensor with a pending reduction ({tensor.placements}), which a "
            "checkpoint can't hold. HINT: keep tensor.redistribute(...) of it"
        )
    if tensor.device_mesh.get_coordinate() is None:  # this rank is not in the mesh
        return None
    ranks = copies(tensor)
    if len(ranks) > 1 and min(ranks) != tensor.device_mesh.get_rank():
        return None
    return {
        "shape": tuple(tensor.shape),
        "offset": held_part(tensor)[0],
        "tensor": tensor.to_local().detach(),
    }


def held_part(tensor: "DTensor") -> tuple[Index, Index]:
    """Return offset and shape of the part of a DTensor that this rank holds."""
    local = tuple(tensor.to_local().shape)
    if not prod(local):
        return (0,) * len(local), local
    (chunk,) = tensor.__create_chunk_list__()
    assert tuple(chunk.sizes) == local, f"{chunk.sizes} for {local}"
    return tuple(chunk.offsets), local


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, as the pieces that its shards hold.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        pieces: Pieces with at least one element, which fill the tensor.
    """

    shape: Index
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "SavedTensor":
        """Return the tensor that these pieces form.

        Raises:
            PieceError: They have different shapes or dtypes, overlap, or leave elements out.
        """
        shape, dtype = pieces[0]["shape"], pieces[0]["tensor"].dtype
        for piece in pieces:
            if piece["shape"] != shape or piece["tensor"].dtype != dtype:
                raise PieceError(f"the pieces of a tensor have shapes {shape}, {piece['shape']}")
            _check_bounds(piece)
        filled = [piece for piece in pieces if piece["tensor"].numel()]
        if sum(piece["tensor"].numel() for piece in filled) != prod(shape):
            raise PieceError(f"the pieces of a tensor of shape {shape} are not complete")
        _check_disjoint(filled)
        return cls(shape, dtype, tuple(filled))

    def part(self, offset: Index, shape: Index) -> torch.Tensor:
        """Return a copy of a part of the tensor, in new memory."""
        found = torch.empty(shape, dtype=self.dtype)
        self.copy_part(offset, found)
        return found

    def copy_part(self, offset: Index, dest: torch.Tensor) -> None:
        """Copy the part that begins at ``offset`` and has the shape of ``dest`` into it."""
        for piece in self.pieces:
            shape = tuple(dest.shape)
            overlap = _overlap(offset, shape, piece["offset"], tuple(piece["tensor"].shape))
            if overlap is not None:
                begin, end = overlap
                source = piece["tensor"][_slices(begin, end, piece["offset"])]
                populate(source)
                dest[_slices(begin, end, offset)].copy_(source)

    def whole(self) -> torch.Tensor:
        """Return a copy of the whole tensor."""
        return self.part((0,) * len(self.shape), self.shape)


def whole(saved: torch.Tensor | SavedTensor) -> torch.Tensor:
    """Return a copy of the whole tensor."""
    return saved.whole() if isinstance(saved, SavedTensor) else saved.clone()


def placed_like(saved: torch.Tensor | SavedTensor, like: Any) -> torch.Tensor:
    """Return a saved tensor with the placement of ``like``, in new memory.

    Only the part that this rank needs is read. Without a DTensor of the same shape in ``like``, the
    result is the whole tensor.
    """
    if not is_sharded(like) or tuple(like.shape) != tuple(saved.shape):
        return whole(saved)
    from torch.distributed.tensor import DTensor

    offset, shape = held_part(like)
    if isinstance(saved, SavedTensor):
        local = saved.part(offset, shape)
    else:
        local = saved[_bounds(offset, shape)].clone()
    return DTensor.from_local(
        local.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def copy_into(saved: torch.Tensor | SavedTensor, dest: Any) -> bool:
    """Copy a saved tensor, or the part of it that ``dest`` holds, into the memory of ``dest``.

    Returns:
        Whether it did: ``dest`` is a dense tensor or a DTensor of the same shape and dtype.
    """
    if not isinstance(dest, torch.Tensor) or torch.nn.parameter.is_lazy(dest):
        return False
    if (tuple(dest.shape), dest.dtype) != (tuple(saved.shape), saved.dtype):
        return False
    is_plain = type(dest) in (torch.Tensor, torch.nn.Parameter) or is_sharded(dest)
    if not is_plain or not all(_is_dense(tensor) for tensor in (saved, dest)):
        return False
    local = dest.to_local() if is_sharded(dest) else dest
    offset = held_part(dest)[0] if is_sharded(dest) else (0,) * dest.dim()
    if local.is_meta or not local.is_contiguous():  # its elements may share memory
        return False
    with torch.no_grad():
        if isinstance(saved, SavedTensor):
            saved.copy_part(offset, local)
        else:
            local.copy_(saved[_bounds(offset, tuple(local.shape))])
    return True


def _is_dense(tensor: torch.Tensor | SavedTensor) -> bool:
    if isinstance(tensor, SavedTensor):
        return True
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _overlap(a: Index, a_shape: Index, b: Index, b_shape: Index) -> tuple[Index, Index] | None:
    """Return begin and end of the overlap of two parts; None if they have none."""
    begin = tuple(map(max, a, b))
    a_end = (first + size for first, size in zip(a, a_shape, strict=True))
    b_end = (first + size for first, size in zip(b, b_shape, strict=True))
    end = tuple(map(min, a_end, b_end))
    empty = any(last <= first for first, last in zip(begin, end, strict=True))
    return None if empty else (begin, end)


def _slices(begin: Index, end: Index, origin: Index) -> tuple[slice, ...]:
    each = zip(begin, end, origin, strict=True)
    return tuple(slice(first - zero, last - zero) for first, last, zero in each)


def _bounds(offset: Index, shape: Index) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


def _check_bounds(piece: Piece) -> None:
    shape, offset, sizes = piece["shape"], piece["offset"], tuple(piece["tensor"].shape)
    inside = len(shape) == len(offset) == len(sizes) and all(
        (first >= 0 and first + size <= whole) or not size
        for first, size, whole in zip(offset, sizes, shape, strict=True)
    )
    if not inside:
        raise PieceError(f"a piece of shape {sizes} at {offset} is outside of {shape}")


def _check_disjoint(pieces: Sequence[Piece]) -> None:
    """Raise PieceError where two pieces overlap; only neighbours by first index can."""
    ordered = sorted(pieces, key=lambda piece: piece["offset"])
    active: list[Piece] = []
    for piece in ordered:
        first = piece["offset"][:1]
        active = [
            other
            for other in active
            if not first or other["offset"][0] + other["tensor"].shape[0] > first[0]
        ]
        for other in active:
            shapes = tuple(other["tensor"].shape), tuple(piece["tensor"].shape)
            if _overlap(other["offset"], shapes[0], piece["offset"], shapes[1]):
                raise PieceError(f"two pieces of a tensor of shape {piece['shape']} overlap")
        active.append(piece)
