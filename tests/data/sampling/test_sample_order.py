"""The order of samples: a function of seed and epoch, split the same way on any number of ranks."""

import pytest
import torch

from paceline.data.sampling.sample_order import BatchSplit, derive_seed, shuffled


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("samples", [24, 100, 101, 103, 1000])
def test_each_batch_is_split_over_ranks_without_overlap(samples, ranks, drop_last):
    split = BatchSplit(samples, batch=24, ranks=ranks, drop_last=drop_last)
    seen = []
    for position in range(len(split)):
        bounds = [split.bounds(position, rank) for rank in range(ranks)]
        part = [i for first, end in bounds for i in range(first, end)]
        assert part == list(range(position * 24, position * 24 + split.total(position)))
        sizes = [end - first for first, end in bounds]
        assert max(sizes) - min(sizes) <= 1
        seen += part
    assert len(seen) == (samples - samples % 24 if drop_last else samples)


def test_batch_smaller_than_world_size_has_fillers():
    split = BatchSplit(samples=10, batch=4, ranks=4)
    shares = [split.share(2, rank) for rank in range(4)]
    assert [share.count for share in shares] == [1, 1, 0, 0]
    assert [share.filler for share in shares] == [False, False, True, True]
    assert all(share.total == 2 and share.last for share in shares)


def test_gradient_accumulation_stops_at_end_of_epoch():
    split = BatchSplit(samples=100, batch=16, ranks=2)  # 6 full batches and one of 4 samples
    assert [split.group_total(p, 3) for p in range(7)] == [48, 48, 48, 48, 48, 48, 4]


def test_shuffle_depends_on_seed_and_epoch():
    assert torch.equal(shuffled(50, 1, 2), shuffled(50, 1, 2))
    assert not torch.equal(shuffled(50, 1, 2), shuffled(50, 1, 3))
    assert not torch.equal(shuffled(50, 1, 2), shuffled(50, 2, 2))
    assert sorted(shuffled(50, 1, 2).tolist()) == list(range(50))


def test_derived_seeds_are_unique():
    seeds = {derive_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
