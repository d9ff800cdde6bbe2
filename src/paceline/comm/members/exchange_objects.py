"""Exchange Paceline's own objects between ranks: as JSON in tensors of bytes, with a type and a
limit.

The object collectives of torch.distributed use pickle: who sends an object can run code in the
ranks that receive it.
"""

import json
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ...security.schema import parse_json
from ..group_device import device_of, gather_equal

T = TypeVar("T")

MAX_OBJECT_BYTES = 64 << 20  # of one rank


def all_gather_objects(value: T, schema: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group, by rank. Collective.

    Args:
        value: Numbers, strings, bytes, None, and lists, tuples, dicts with strings as keys and
            dataclasses of them.
        schema: Their type, as for ``security.schema``.

    Raises:
        ValueError: On all ranks: the value of a rank has over MAX_OBJECT_BYTES, or is not of this
            type.
    """
    own = _encode(value, device_of(group))
    sizes = gather_equal(torch.tensor([len(own)], device=own.device), group)
    lengths = [_checked_length(int(each), rank) for rank, each in enumerate(sizes)]
    padded = own.new_zeros(max(lengths))
    padded[: len(own)] = own
    rows = gather_equal(padded, group)
    return [_decode(rows[rank][:length], schema, rank) for rank, length in enumerate(lengths)]


def broadcast_object(value: T, schema: Any, group: dist.ProcessGroup | None = None) -> T:
    """Return the value of the group's first rank. Collective.

    Arguments and errors as for ``all_gather_objects``; the value of other ranks is not used.
    """
    first = dist.get_rank(group) == 0
    source = dist.get_global_rank(group, 0) if group is not None else 0
    device = device_of(group)
    own = _encode(value, device) if first else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, source, group)
    number = _checked_length(int(length), 0)
    received = own if first else own.new_empty(number)
    dist.broadcast(received, source, group)
    found: T = _decode(received, schema, 0)
    return found


def _encode(value: Any, device: torch.device) -> torch.Tensor:
    data = bytearray(json.dumps(msgspec.to_builtins(value)).encode())
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor, schema: type[T], rank: int) -> T:
    content = data.cpu().numpy().tobytes()
    return parse_json(content, schema, f"the object of rank {rank}", escape=False)


def _checked_length(length: int, rank: int) -> int:
    if not 0 < length <= MAX_OBJECT_BYTES:
        raise ValueError(
            f"rank {rank} sends an object of {length:,} bytes to the other ranks; at most "
            f"{MAX_OBJECT_BYTES:,} are possible"
        )
    return length
