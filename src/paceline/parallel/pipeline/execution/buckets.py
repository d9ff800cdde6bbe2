"""Tensors that are exchanged together."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import torch

BUCKET_BYTES = 25 << 20


class Exchanged(Protocol):
    """What a bucket is made of."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...


One = TypeVar("One", bound=Exchanged)


def buckets(tensors: Iterable[One]) -> Iterator[list[One]]:
    """Yield tensors of one dtype and device, of at most BUCKET_BYTES if there are several."""
    kinds: dict[tuple[torch.dtype, torch.device], list[One]] = defaultdict(list)
    for one in tensors:
        kinds[one.dtype, one.device].append(one)
    for of_kind in kinds.values():
        bucket: list[One] = []
        for one in of_kind:
            if bucket and sum(each.nbytes for each in bucket) + one.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(one)
        yield bucket
