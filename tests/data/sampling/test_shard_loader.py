"""world.shard without ranks: the batches of each rank's loader, and errors."""

import random

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.sampling.shard_loader import shard


def sharded(loader, rank=0, ranks=1, **options):
    options = {"seed": 7, "agree": lambda *_: None, "count_all": lambda n: n} | options
    return shard(loader, rank=rank, ranks=ranks, **options)


def numbers(n):
    return TensorDataset(torch.arange(n))


class Noisy(Dataset):
    """A dataset that augments with every random generator that users draw from."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_global_batches_are_independent_of_world_size(ranks):
    loader = DataLoader(numbers(50), batch_size=1, shuffle=True)
    alone = [b[0].tolist() for b, _ in sharded(loader, global_batch=8).iterate(3)]
    parts = [
        [b[0].tolist() for b, _ in sharded(loader, r, ranks, global_batch=8).iterate(3)]
        for r in range(ranks)
    ]
    together = [[n for part in batches for n in part] for batches in zip(*parts, strict=True)]
    # Padding repeats a sample of the last, uneven batch.
    assert together[:-1] == alone[:-1]
    assert together[-1][:2] == alone[-1]


def test_iterate_resumes_at_any_batch():
    loader = sharded(DataLoader(numbers(50), batch_size=8, shuffle=True))
    whole = [b[0].tolist() for b, _ in loader.iterate(1)]
    for start in range(len(loader)):
        assert [b[0].tolist() for b, _ in loader.iterate(1, start)] == whole[start:]


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_seed_epoch_and_sample_only(workers):
    def draws(rank, ranks, epoch):
        loader = DataLoader(Noisy(), batch_size=1, shuffle=True, num_workers=workers)
        part = sharded(loader, rank, ranks, global_batch=4)
        rows = [torch.stack([t.double() for t in b]).T for b, _ in part.iterate(epoch)]
        return {int(i): (a, b) for i, a, b in torch.cat(rows).tolist()}

    alone = draws(0, 1, 0)
    assert draws(0, 2, 0) | draws(1, 2, 0) == alone
    assert draws(0, 1, 1) != alone


def test_loading_does_not_change_global_rng_state():
    loader = sharded(DataLoader(Noisy(), batch_size=5, shuffle=True))
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    list(loader.iterate(0))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_random_sampler_order_is_equal_on_all_ranks():
    weights = [1.0] * 10 + [9.0] * 10
    loaders = [
        DataLoader(numbers(20), batch_size=5, sampler=WeightedRandomSampler(weights, 30))
        for _ in range(2)
    ]
    orders = []
    for loader in loaders:
        told = []
        part = sharded(loader, 0, 2, agree=lambda value, _, told=told: told.append(value))
        list(part.iterate(0))
        orders.append(told[0])
    assert orders[0] == orders[1]


def test_validation_uses_every_sample_once():
    seen = []
    for rank in range(4):
        loader = DataLoader(numbers(10), batch_size=1)
        part = sharded(loader, rank, 4, global_batch=4, every_sample_once=True)
        seen += [n for b, share in part.iterate(0) for n in b[0].tolist() if not share.filler]
    assert sorted(seen) == list(range(10))


class Stream(IterableDataset):
    def __init__(self, n, rank=0, ranks=1):
        self.n, self.rank, self.ranks = n, rank, ranks

    def shard(self, num_shards, index):
        return Stream(self.n, index, num_shards)

    def __iter__(self):
        return iter(range(self.rank, self.n, self.ranks))


class Unsplittable(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_stream_is_split_by_dataset_method():
    parts = [sharded(DataLoader(Stream(10), batch_size=2), rank, 2) for rank in range(2)]
    assert [b.tolist() for b in parts[0]] == [[0, 2], [4, 6], [8]]
    assert [b.tolist() for b in parts[1]] == [[1, 3], [5, 7], [9]]


def test_unsplittable_stream_is_rejected_unless_stride_is_requested():
    loader = DataLoader(Unsplittable(), batch_size=2)
    with pytest.raises(
        ValueError, match=r"each of 2 ranks would read all of it.*HINT.* every 2nd sample"
    ):
        sharded(loader, 0, 2)
    part = sharded(loader, 1, 2, split="stride")
    assert [b.tolist() for b in part] == [[1, 3], [5, 7], [9]]


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(numbers(3), batch_size=1), {}, r"3 samples for 4 ranks.*HINT: start at most 3"),
        (DataLoader(numbers(99)), {"global_batch": 10}, r"10 can't be divided by 4.*HINT: .*=8"),
        (DataLoader(numbers(99)), {"global_batch": 2}, r"2 can't be divided by 4.*HINT: .*=4"),
        (
            DataLoader(numbers(9), sampler=DistributedSampler(numbers(9), 2, 0)),
            {},
            r"splits the samples already.*HINT",
        ),
        (DataLoader(numbers(9), batch_sampler=[[0, 1], [2]]), {}, r"batch_sampler \(list\).*HINT"),
        (DataLoader(numbers(5), batch_size=2, drop_last=True), {}, r"drop_last=True.*HINT"),
        ([1, 2, 3], {}, r"not list.*HINT"),
        (DataLoader(numbers(99), batch_size=None), {}, r"HINT"),
    ],
)
def test_unsupported_loaders_are_rejected_with_hint(loader, options, message):
    with pytest.raises(ValueError, match=message):
        sharded(loader, 0, 4, **options)


class EpochStream(IterableDataset):
    """Yields numbers that depend on the epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + 4))


@pytest.mark.parametrize("persistent", [False, True])
def test_epoch_of_stream_reaches_worker_processes(persistent):
    loader = DataLoader(EpochStream(), 2, num_workers=1, persistent_workers=persistent)
    part = sharded(loader)
    found = [[b.tolist() for b in part] for _ in range(3)]
    assert found == [[[10 * e, 10 * e + 1], [10 * e + 2, 10 * e + 3]] for e in range(3)]
    part.set_epoch(7)
    assert next(iter(part)).tolist() == [70, 71]


def test_order_of_a_foreign_sampler_leaves_random_generators_alone():
    generator = torch.Generator().manual_seed(3)
    weights = WeightedRandomSampler([1.0] * 20, 20, generator=generator)
    part = sharded(DataLoader(numbers(20), 5, sampler=weights))
    states = [torch.get_rng_state(), generator.get_state()]
    before = random.getstate()
    list(part.iterate(0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == before


class ReadsBatches(Dataset):
    """A dataset with ``__getitems__``; ``draws``: with augmentation."""

    def __init__(self, draws):
        self.draws, self.batches = draws, []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item() if self.draws else 0.0

    def __getitems__(self, indices):
        self.batches.append(len(indices))
        return [self[index] for index in indices]


def test_batches_are_read_at_once_where_the_dataset_can():
    data = ReadsBatches(draws=False)
    loader = sharded(DataLoader(data, batch_size=5))
    assert [b[0].tolist() for b, _ in loader.iterate(0)][1] == [5, 6, 7, 8, 9]
    assert data.batches == [5] * 4


def test_augmentation_of_batches_is_independent_of_their_size():
    few, many = (
        {
            n: x
            for b, _ in sharded(DataLoader(ReadsBatches(True), size)).iterate(0)
            for n, x in zip(*map(torch.Tensor.tolist, b), strict=True)
        }
        for size in (5, 20)
    )
    assert few == many
    assert len(set(few.values())) == 20


class ReadsSeed(Dataset):
    """A dataset whose augmentation has a generator of its own, seeded by torch's seed."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, random.Random(torch.initial_seed()).random()


def test_seed_that_samples_read_differs_between_samples_of_a_subset():
    part = Subset(ReadsSeed(), range(12))
    values = [
        [x for b, _ in sharded(DataLoader(part, size)).iterate(epoch) for x in b[1].tolist()]
        for epoch, size in ((0, 4), (0, 6), (1, 4))
    ]
    assert values[0] == values[1]
    assert len({*values[0], *values[2]}) == 24
