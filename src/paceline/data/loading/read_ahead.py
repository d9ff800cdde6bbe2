"""Reading ahead of what is trained on, a large block at a time: what makes ``shuffle="blocks"`` as
fast as the storage reads on, though single samples are asked for."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from ..sampling.samplers import BLOCK_BYTES, WINDOW
from ..shards import Shards

Keys = list[Any]


class ReadAhead:
    """``batches`` passed on, each when the blocks of those that come so many samples later have
    been asked for. submit: runs a function beside the training."""

    def __init__(
        self, shards: Shards, batches: Iterator[Keys], samples: int, submit: Callable[..., Any]
    ) -> None:
        self._shards, self._batches, self._samples, self._submit = shards, batches, samples, submit
        self._coming: deque[Keys] = deque()
        self._count = 0
        self._asked: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Keys:
        while self._count <= self._samples and (keys := next(self._batches, None)) is not None:
            self._coming.append(keys)
            self._count += len(keys)
            self._submit(self._ask, keys)
        if not self._coming:
            raise StopIteration
        first = self._coming.popleft()
        self._count -= len(first)
        return first

    def _ask(self, keys: Keys) -> None:
        """The kernel reads them while others are used; what it has already costs nothing."""
        for key in keys:
            row = self._shards.row(key[1] if isinstance(key, tuple) else int(key))
            block = row.offset // BLOCK_BYTES
            for place in {
                (row.shard, block),
                (row.shard, (row.offset + row.length) // BLOCK_BYTES),
            }:
                if place not in self._asked:
                    self._asked[place] = None
                    if len(self._asked) > 4 * WINDOW:
                        self._asked.popitem(last=False)
                    self._shards.prefetch_block(*place, BLOCK_BYTES)


def read_ahead_samples(shards: Shards) -> int:
    """Half of a window: the next one is asked for while there is still as much of this one."""
    each = max(shards.meta.bytes / len(shards), 1)
    return max(int(WINDOW * BLOCK_BYTES / each / 2), 1)
