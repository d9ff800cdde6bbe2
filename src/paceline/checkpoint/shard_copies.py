"""Copies of a shard on several ranks (HSDP), and whether they are equal when they are saved.

Only the first of the ranks that hold the same shard of a DTensor writes it. If the others differ,
they train something else than the checkpoint contains. So ranks compare one digest of all shards
that have copies, and only if these differ one of each tensor. Large tensors are summed on their
device for it.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import state_tree
from .sharded_tensor import Copies, copies_in_mesh, is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DIGEST_BYTES = 16
_HASHED_BYTES = 1 << 16  # of larger tensors the digest has sums
_ROW = 512  # 64-bit integers


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of dtype, shape and bits of a tensor."""
    content = hashlib.blake2b(digest_size=DIGEST_BYTES)
    add_tensor(tensor, content.update)
    return content.digest()


def add_tensor(tensor: torch.Tensor, add: Callable[[bytes], None]) -> None:
    """Add dtype, shape and bits of a tensor to a digest."""
    add(f"{tensor.dtype} {tensor.layout} {tensor.is_nested or tuple(tensor.shape)};".encode())
    if tensor.is_quantized:
        add(f"{tensor.qscheme()}".encode())
        add(f"{_quantization(tensor)}".encode())
    for dense in state_tree.dense_parts(tensor):
        _add_dense(dense, add)


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scales.tolist(), points.tolist(), tensor.q_per_channel_axis()


def _add_dense(tensor: torch.Tensor, add: Callable[[bytes], None]) -> None:
    """Add the bits of a tensor to a digest, on its device as far as it is large.

    Of a large tensor the bits are summed as integers, in rows and in columns. So also tensors that
    have the same elements in another order differ.
    """
    flat = tensor.contiguous().resolve_conj().resolve_neg().flatten()
    if flat.numel() == 0:
        return
    octets = flat.view(torch.uint8)
    if octets.numel() > _HASHED_BYTES:
        summed = octets.numel() // (8 * _ROW) * (8 * _ROW)
        block = octets[:summed]
        if block.data_ptr() % 8 or block.storage_offset() % 8:
            block = block.clone()
        rows = block.view(torch.int64).view(-1, _ROW)
        _add_dense(rows.sum(1), add)
        _add_dense(rows.sum(0), add)
        octets = octets[summed:]
    add(octets.cpu().numpy().tobytes())


PartPath = tuple[Any, ...]  # keys of a part in the tree, at most two: ("models", 0)
ShardKey = tuple[PartPath, str]  # a part of the state, and which shard of which mesh
TensorPath = tuple[Any, ...]  # keys of a tensor in its part


class DifferentCopy(NamedTuple):
    """A rank whose copy of a shard differs.

    Attributes:
        part: Part of the state.
        tensor: Keys of the first tensor in it that differs.
        rank: The rank.
        source: The rank that saves this shard.
    """

    part: PartPath
    tensor: TensorPath
    rank: int
    source: int


def _held_by(ranks: list[int]) -> str:
    """Return a text that is equal on the ranks that hold copies of a shard, and only on these."""
    return f"{len(ranks)} copies {zlib.crc32(repr(sorted(ranks)).encode()):08x}"


class ShardDigests:
    """Digests of the shards with copies of one rank.

    Attributes:
        of_shards: One digest of all tensors of a part in the same shard.
        of_tensors: The digests of the single tensors.
    """

    def __init__(self, copies: Copies = copies_in_mesh) -> None:
        self._copies = copies
        self.of_tensors: dict[ShardKey, dict[TensorPath, bytes]] = {}

    def add(self, part: PartPath, path: TensorPath, tensor: "DTensor") -> None:
        """Add the shard of a DTensor, unless no other rank holds a copy of it."""
        self.add_copies(part, path, tensor, self._copies(tensor))

    def add_copies(
        self, part: PartPath, path: TensorPath, tensor: torch.Tensor, ranks: list[int]
    ) -> None:
        """Add a tensor of which these ranks hold copies, of a DTensor those of this shard."""
        if len(ranks) > 1:
            own = tensor.to_local() if is_sharded(tensor) else tensor
            of_shard = self.of_tensors.setdefault((part, _held_by(ranks)), {})
            of_shard[path] = tensor_digest(own.detach())

    @property
    def of_shards(self) -> dict[ShardKey, bytes]:
        return {
            key: hashlib.blake2b(b"".join(each.values()), digest_size=DIGEST_BYTES).digest()
            for key, each in self.of_tensors.items()
        }


def shards_that_differ(digests: Sequence[Mapping[ShardKey, bytes]]) -> set[ShardKey]:
    """Return the shards whose copies are not equal; ``digests`` has ``of_shards`` of each rank."""
    first: dict[ShardKey, bytes] = {}
    return {
        key
        for own in digests
        for key, digest in own.items()
        if first.setdefault(key, digest) != digest
    }


def name_copies(
    digests: Sequence[Mapping[ShardKey, Mapping[TensorPath, bytes]]],
) -> list[DifferentCopy]:
    """Return the copies that differ from the first rank's; ``digests`` has one item a rank."""
    first: dict[ShardKey, tuple[int, Mapping[TensorPath, bytes]]] = {}
    found = []
    for rank, own in enumerate(digests):
        for key, each in own.items():
            source, expected = first.setdefault(key, (rank, each))
            paths = [*expected, *each]
            path = next((p for p in paths if expected.get(p) != each.get(p)), None)
            if path is not None:
                found.append(DifferentCopy(key[0], path, rank, source))
    return found
