"""Prefetch for ``shuffle="blocks"``: large blocks are read before their samples are requested.

With it, loading reaches the sequential bandwidth of the storage, although single samples are
requested.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from ..sampling.samplers import BLOCK_BYTES, WINDOW
from ..shards import Shards

Keys = list[Any]


class ReadAhead:
    """Iterator over batches of keys that prefetches the blocks of later batches.

    Args:
        shards: The dataset.
        batches: Iterator over lists of keys, one list per batch.
        samples: Number of samples to prefetch ahead of the current batch.
        submit: Function that runs a function in a worker.
    """

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
        """Ask the kernel to read the blocks of these samples in the background.

        Blocks that are in the page cache already are not read again.
        """
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
    """Return the number of samples to prefetch: half of a window.

    The next window is then requested while half of the current one is still unused.
    """
    each = max(shards.meta.bytes / len(shards), 1)
    return max(int(WINDOW * BLOCK_BYTES / each / 2), 1)
