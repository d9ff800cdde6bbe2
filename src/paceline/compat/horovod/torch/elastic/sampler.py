"""Distribution of samples over ranks that knows which ones an epoch has had."""

import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ..mpi_ops import rank, size


class ElasticSampler(Sampler[int]):
    """Sampler that distributes the samples which are left of an epoch over the current ranks.

    Include it in the ``TorchState``, call ``record_batch`` after each batch, and ``set_epoch`` at
    the end of each epoch.

    Args:
        dataset: The dataset, of constant size.
        shuffle: Whether the order is random, a different one in each epoch.
        seed: Seed of the order, equal on all ranks.

    Attributes:
        processed_num: Samples of this epoch that all ranks together have processed.
        processed_indices: Samples that ``record_indices`` has named.
        remaining_indices: Samples that are left, in order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it is processed. To be called at the end of the last one."""
        self.epoch, self.processed_num = epoch, 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take note that each rank has processed ``batch_size`` samples."""
        if batch_size < 0:
            raise ValueError(f"record_batch: batch_size must be >= 0, not {batch_size}")
        self.processed_num += batch_size * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the samples of this rank's batch ``batch_idx``."""
        first = batch_idx * batch_size
        return self._of_rank()[first : first + batch_size]

    def record_indices(self, indices: Iterable[int]) -> None:
        """Take note that this rank has processed these samples."""
        self.processed_indices.update(int(index) for index in indices)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that are left over the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [
            index for index in order[self.processed_num :] if index not in self.processed_indices
        ]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _of_rank(self) -> list[int]:
        """Return this rank's samples; the first ones are repeated until all ranks have as many."""
        whole = list(self.remaining_indices)
        while whole and len(whole) < self.total_size:
            whole += whole[: self.total_size - len(whole)]
        return whole[self.rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        self.indices = self._of_rank()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
