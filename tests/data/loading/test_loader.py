"""paceline.data.Loader: the batches of a DataLoader, from threads, ordered by seed and epoch."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from itertools import chain

import numpy as np
import pytest
import ranks
import sets
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from paceline.data import DataError, Loader, Shards, pack
from paceline.data.loading import loader as loader_module
from paceline.data.loading import open_dataset
from paceline.data.sampling.samplers import BlockShuffled, Weighted
from paceline.data.sampling.shard_loader import shard


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    x, y = sets.arrays(50)
    pack(x, folder / "out", y, shard_bytes=500)
    return folder / "out"


def sharded(loader, rank=0, ranks=1, **options):
    options = {"seed": 7, "agree": lambda *_: None, "count_all": lambda n: n} | options
    return shard(loader, rank=rank, ranks=ranks, **options)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 7, 50, 64])
def test_batches_match_torch_dataloader(arrays, threads, batch):
    mine = list(Loader(arrays, batch, num_workers=threads))
    plain = list(DataLoader(Shards(arrays), batch))
    assert len(mine) == len(plain) == len(Loader(arrays, batch))
    for (x, y), (a, b) in zip(mine, plain, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def test_image_batches_are_nchw_in_channels_last_memory_format(images):
    x, y = next(iter(Loader(images, 5)))
    assert x.shape == (5, 3, 20, 24)
    assert x.dtype == torch.uint8
    assert y.dtype == torch.int64
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(x[2].permute(1, 2, 0).numpy(), Shards(images)[2][0])


def test_loader_is_a_torch_dataloader(arrays):
    loader = Loader(arrays, 10, shuffle=True, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert len(loader.dataset) == 50
    assert len(list(loader)) == 5


@pytest.mark.parametrize("source", ["pair", "tensors", "one", "double"])
def test_in_memory_arrays_and_tensor_datasets(source):
    x, y = sets.arrays(20)
    made = {
        "pair": (x, y),
        "tensors": TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        "one": x,
        "double": (torch.from_numpy(x).double(), torch.from_numpy(y).float()),
    }[source]
    loader = Loader(made, 8, shuffle=True, seed=3)
    batches = list(loader)
    got = torch.cat([batch[0] if source != "one" else batch for batch in batches])
    order = got.reshape(20, -1)[:, 0].long()
    assert sorted(order.tolist()) == list(range(20)) != order.tolist()
    assert torch.equal(got.float(), torch.from_numpy(x)[order])
    if source != "one":
        assert torch.equal(torch.cat([b[1] for b in batches]).long(), torch.from_numpy(y)[order])


@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_sample_order_depends_on_seed_and_epoch(arrays, shuffle):
    def order(loader):
        return [int(v) for x, _ in loader for v in x.reshape(len(x), -1)[:, 0]]

    one, two, other = (Loader(arrays, 8, shuffle, seed=seed) for seed in (1, 1, 2))
    first, second = order(one), order(one)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert (order(two), order(two)) == (first, second)
    assert order(other) != first
    two.set_epoch(0)
    assert order(two) == first


def test_block_shuffle_reads_a_window_of_blocks_together():
    order = BlockShuffled(1000, 10, window=4).order(0, 0)
    assert sorted(order.tolist()) == list(range(1000))
    for first in range(0, 960, 40):
        blocks = {int(i) // 10 for i in order[first : first + 40]}
        assert len(blocks) == 4
    assert len({int(i) // 10 for i in order[:10]}) > 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_global_batch_is_independent_of_world_size(arrays, ranks):
    def transform(x, rng):
        return x + rng.normal(size=x.shape)

    loader = Loader(arrays, 1, shuffle=True, transform=transform)
    parts = [sharded(loader, rank, ranks, global_batch=12) for rank in range(ranks)]
    alone = sharded(loader, 0, 1, global_batch=12)
    for batches in zip(alone.iterate(3), *(part.iterate(3) for part in parts), strict=True):
        (whole, _), *split = batches
        own = [batch for batch, share in split if not share.filler]
        assert torch.equal(whole[0], torch.cat([x for x, _ in own]))
        assert torch.equal(whole[1], torch.cat([y for _, y in own]))


def test_every_sample_once_across_restarts_with_changed_world_size(arrays):
    """Batches returned after the last checkpoint count as lost when the job is killed."""
    draw = random.Random(5)
    for _ in range(20):
        seen, position, batch = [], 0, 6
        while position < 9:
            ranks = draw.choice((1, 2, 3, 6))
            loader = Loader(arrays, 1, shuffle=True, num_workers=draw.choice((0, 2)))
            until = draw.randint(position, 9)
            for rank in range(ranks):
                part = sharded(loader, rank, ranks, global_batch=batch)
                passing = part.iterate(4, position)
                for _, ((x, _), share) in zip(range(until - position), passing, strict=False):
                    seen += [] if share.filler else [int(v) for v in x.reshape(len(x), -1)[:, 0]]
            position = until
        assert sorted(seen) == list(range(50))


def test_state_dict_resumes_mid_epoch(arrays):
    loader = Loader(arrays, 8, shuffle=True)
    whole = [y.tolist() for _, y in Loader(arrays, 8, shuffle=True)]
    passing = iter(loader)
    before = [next(passing)[1].tolist() for _ in range(3)]
    state = loader.state_dict()
    assert state == {"epoch": 0, "sample": 24}
    other = Loader(arrays, 5, shuffle=True)
    other.load_state_dict(state)
    after = [label for _, y in other for label in y.tolist()]
    assert [*chain(*before), *after] == [*chain(*whole)]
    assert other.state_dict() == {"epoch": 1, "sample": 0}
    assert len(list(other)) == 10


@pytest.mark.parametrize(("workers", "processes"), [(1, False), (2, True)])
def test_batch_buffers_are_reused_only_when_unreferenced(arrays, workers, processes):
    loader = Loader(arrays, 5, num_workers=workers, processes=processes)
    kept = [(x, x.clone()) for x, _ in loader]
    list(loader)
    assert all(torch.equal(x, copy) for x, copy in kept)
    part = [x[1:2, 0] for x, _ in loader]  # views keep the whole batch alive
    copies = [x.clone() for x in part]
    list(loader)
    assert all(torch.equal(x, copy) for x, copy in zip(part, copies, strict=True))
    del kept, part
    gc.collect()
    made = loader._pipeline.buffer_pool.allocated
    for _ in range(5):
        for _ in loader:
            pass
    assert loader._pipeline.buffer_pool.allocated == made


def test_buffer_count_is_bounded_over_epochs(arrays):
    loader = Loader(arrays, 5, shuffle=True)
    for _ in range(20):
        for _ in loader:
            pass
    # Samples and labels: two prefetched batches, one in use, one that a thread is releasing.
    assert loader._pipeline.buffer_pool.allocated <= 2 * 4


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_transform_rng_depends_on_seed_epoch_and_sample(images, threads):
    def crop(x, rng):
        top, left = rng.integers(0, 5, 2)
        return x[top : top + 16, left : left + 16].astype(np.float32) / 255

    loader = Loader(images, 4, num_workers=threads, transform=crop, seed=2)
    first = torch.cat([x for x, _ in loader])
    again = torch.cat([x for x, _ in Loader(images, 9, num_workers=2, transform=crop, seed=2)])
    assert first.shape == (30, 3, 16, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.cat([x for x, _ in loader]))  # the next epoch


def test_optional_second_argument_of_a_transform_is_not_the_generator(images):
    def crop(x, size=4):
        return x[:size, :size]

    def annotated(x, source: np.random.Generator | None = None):
        return x * 0 + source.integers(1, 9, dtype=np.uint8)

    (shape,) = {tuple(x.shape) for x, _ in Loader(images, 30, transform=crop)}
    assert shape == (30, 3, 4, 4)
    flipped, plain = (next(iter(Loader(images, 4, transform=t)))[0] for t in (np.flip, None))
    assert torch.equal(flipped, plain.flip(1, 2, 3))
    assert len(next(iter(Loader(images, 4, transform=annotated)))[0].unique()) > 1


def test_transform_may_return_tensors(images):
    def chw(x):
        return torch.from_numpy(x).permute(2, 0, 1).float()

    x, _ = next(iter(Loader(images, 4, transform=chw)))
    assert x.shape == (4, 3, 20, 24)
    assert x.is_contiguous()


def test_failing_transform_names_sample(images):
    def odd(x):
        raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        next(iter(Loader(images, 4, transform=odd)))
    assert "in the transform of sample 0 of Shards(" in error.value.__notes__[0]


def test_mixed_sample_shapes_need_transform_or_collate_fn(tmp_path):
    for name, size in (("a", (20, 24)), ("b", (30, 24))):
        sets.images(tmp_path / "in" / name, 3, size)
    pack(tmp_path / "in", tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"sample \d is uint8 of .* HINT: use a transform that crops"
    ):
        list(Loader(tmp_path / "out", 6))
    batch = next(iter(Loader(tmp_path / "out", 6, collate_fn=lambda batch: batch)))
    assert {x.shape for x, _ in batch} == {(20, 24, 3), (30, 24, 3)}


def test_unreadable_sample_raises_or_is_skipped(tmp_path, arrays, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in arrays.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shards = Shards(copy)
    for i in (0, 13, 49):
        row = shards.row(i)
        path = copy / shards.meta.shards[row.shard].file
        data = bytearray(path.read_bytes())
        data[row.offset] ^= 1
        path.write_bytes(data)
    with pytest.raises(DataError, match="sample 0 at byte"):
        list(Loader(copy, 10))
    loader = Loader(copy, 10, on_error="skip")
    with pytest.warns(UserWarning, match="the Loader left out a sample .*sample 0 at byte"):
        sizes = [len(x) for x, _ in loader]
    assert sizes == [9, 9, 10, 10, 9]
    assert [error.sample for error in loader.skipped] == [0, 13, 49]
    del loader
    gc.collect()
    assert "3 samples were left out; the first:" in capsys.readouterr().err


def test_torch_sampler_is_used(arrays):
    weights = [1.0 if i < 5 else 0.0 for i in range(50)]
    sampler = WeightedRandomSampler(weights, 40)
    seen = torch.cat([y for _, y in Loader(arrays, 8, sampler=sampler)])
    labels = Shards(arrays).labels()
    assert set(seen.tolist()) <= set(labels[:5].tolist())
    assert len(seen) == 40


def test_num_workers_can_be_changed(arrays):
    loader = Loader(arrays, 5, num_workers=1)
    list(loader)
    loader.num_workers = 3
    list(loader)
    running = [t for t in threading.enumerate() if t.name.startswith("paceline-loader")]
    assert len({t.name for t in running}) >= 2


@pytest.mark.parametrize("seeds", ["rng", "global"])
def test_worker_processes_match_worker_threads(images, seeds):
    def by_rng(x, rng):
        return x[:16, :16] + rng.integers(0, 9, dtype=np.uint8)

    def by_global(x):
        return x[:16, :16] * np.float32(random.random() + torch.rand(()).item() + np.random.rand())

    transform = by_rng if seeds == "rng" else by_global
    found = []
    for workers in (1, 3):
        loader = Loader(images, 7, True, num_workers=workers, transform=transform, processes=True)
        found.append([[(x.clone(), y.clone()) for x, y in loader] for _ in range(3)])
        if seeds == "rng":
            again = Loader(images, 7, True, num_workers=workers, transform=transform)
            found.append([[(x.clone(), y.clone()) for x, y in again] for _ in range(3)])
    for other in found[1:]:
        for one, two in zip(chain(*found[0]), chain(*other), strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


def test_killed_worker_process_is_reported(images):
    def deadly(x):
        os.kill(os.getpid(), signal.SIGKILL)

    loader = Loader(images, 4, num_workers=2, processes=True, collate_fn=list, transform=deadly)
    with pytest.raises(RuntimeError, match=r"was killed by SIGKILL \(the kernel sends it"):
        list(loader)


def test_errors_in_worker_processes_are_raised_as_in_threads(tmp_path, images):
    def odd(x):
        raise KeyError("mine")

    loader = Loader(images, 4, num_workers=2, processes=True, collate_fn=list, transform=odd)
    with pytest.raises(KeyError) as error:
        list(loader)
    assert any("in the transform of sample" in note for note in error.value.__notes__)
    assert any("raise KeyError" in note for note in error.value.__notes__)
    for name, size in (("a", (20, 24)), ("b", (30, 24))):
        sets.images(tmp_path / "in" / name, 3, size)
    pack(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match="HINT: use a transform that crops"):
        list(Loader(tmp_path / "out", 6, processes=True))
    batch = next(iter(Loader(tmp_path / "out", 6, processes=True, collate_fn=list)))
    assert {tuple(x.shape) for x, _ in batch} == {(20, 24, 3), (30, 24, 3)}


def test_worker_processes_exit_when_loader_is_deleted(images):
    loader, other = (Loader(images, 4, num_workers=2, processes=True) for _ in range(2))
    list(loader)
    list(other)  # its worker processes inherit the first loader's open pipes
    running = [one._process for one in loader._workers[1]._workers]
    assert all(process.is_alive() for process in running)
    del loader
    gc.collect()
    for process in running:
        process.join(10)
        assert process.exitcode == 0
    assert len(list(other)) == 8


def test_worker_processes_exit_when_rank_is_killed(images, tmp_path):
    program = (
        "import os, signal, sys\nfrom paceline.data import Loader\n"
        "loader = Loader(sys.argv[1], 4, num_workers=2, processes=True)\n"
        "list(loader)\nprint(*[one._process.pid for one in loader._workers[1]._workers])\n"
        "sys.stdout.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, images], capture_output=True, text=True)
    assert len(done.stdout.split()) == 2
    ranks.wait_until(lambda: not ranks.alive(str(images)))


def test_datasets_are_concatenated_and_mixed_by_weight(arrays, tmp_path):
    x, y = sets.arrays(30, seed=1)
    pack(x, tmp_path / "other", y)
    loader = Loader([arrays, tmp_path / "other", (x, y)], 16)
    whole = [torch.cat([b[part] for b in loader]) for part in (0, 1)]
    assert len(whole[0]) == 110
    assert torch.equal(whole[0][80:], torch.from_numpy(x))
    assert torch.equal(whole[1][50:80], torch.from_numpy(Shards(tmp_path / "other").labels()))
    shares = Weighted.mixed((50, 30, 30), (0.0, 0.25, 0.75), samples=4000)
    drawn = torch.tensor(list(shares))
    assert drawn.min() >= 50
    assert 0.2 < ((drawn < 80).double().mean().item()) < 0.3
    with pytest.raises(ValueError, match="can't be concatenated"):
        Loader([arrays, x])


def test_balanced_sampler_draws_classes_equally(tmp_path):
    x = np.zeros((100, 2), np.float32)
    y = np.array([0] * 90 + [1] * 10)
    pack(x, tmp_path / "out", y)
    sampler = Weighted.balanced(Shards(tmp_path / "out").labels(), samples=2000, seed=4)
    for size in (1, 2):
        loader = Loader(tmp_path / "out", 50 // size, sampler=sampler)
        parts = [sharded(loader, rank, size) for rank in range(size)]
        seen = torch.cat([labels for part in parts for (_, labels), _ in part.iterate(0)])
        assert len(seen) == 2000
        assert 0.45 < seen.double().mean().item() < 0.55


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Weighted([0.0, 0.0]), "not all zero"),
        (
            lambda: Loader(np.zeros((3, 2)), processes=True, pin_memory=True),
            "is not supported with processes=True",
        ),
        (lambda: Loader("nowhere"), "nowhere: the folder does not exist"),
        (lambda: Loader(3), "int is not a source"),
        (lambda: Loader((np.zeros((3, 2)), np.zeros(4))), "x has 3 samples, but y has 4 labels"),
        (lambda: Loader(np.zeros((0, 2))), "has no samples"),
        (lambda: Loader(np.zeros((3, 2)), shuffle="yes"), "this is 'yes'"),
        (lambda: Loader(np.zeros((3, 2)), on_error="go"), "'stop' or 'skip'; this is 'go'"),
        (lambda: Loader(np.zeros((3, 2)), shuffle=True, sampler=[0]), "both define the order"),
        (lambda: Loader(np.array([object()])), "is not an array of samples"),
    ],
)
def test_invalid_arguments_are_reported(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_prefetched(arrays, monkeypatch, ranks):
    for module in (loader_module, open_dataset):
        monkeypatch.setattr(module, "BLOCK_BYTES", 96)  # two samples
    monkeypatch.setattr(loader_module, "WINDOW", 4)
    said = []
    monkeypatch.setattr(
        Shards, "prefetch_block", lambda _, shard, block, size: said.append((shard, block))
    )
    read = Shards.read_into

    def reading(shards, i, *rest):
        said.append(i)
        return read(shards, i, *rest)

    monkeypatch.setattr(Shards, "read_into", reading)
    loader = Loader(arrays, 4 // ranks, "blocks", num_workers=0)
    assert loader.sampler.block == 2
    parts = [sharded(loader, rank, ranks) for rank in range(ranks)]
    for part in parts:
        for _ in part.iterate(0):
            pass
    asked, far = set(), []
    shards = Shards(arrays)
    for at, one in enumerate(said):
        if isinstance(one, tuple):
            asked.add(one)
        else:
            row = shards.row(one)
            assert (row.shard, row.offset // 96) in asked
            far.append(said.index((row.shard, row.offset // 96)) < at - 3)
    assert any(far)
    assert sum(isinstance(one, int) for one in said) == 50


def damaged(arrays, folder, bad):
    """Copy a packed dataset and change a byte of some samples."""
    folder.mkdir()
    for path in arrays.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shards = Shards(folder)
    for i in bad:
        row = shards.row(i)
        path = folder / shards.meta.shards[row.shard].file
        data = bytearray(path.read_bytes())
        data[row.offset] ^= 1
        path.write_bytes(data)
    return folder


def spread(x, rng):
    return x + 1


@pytest.mark.filterwarnings("ignore:the Loader left out")
@pytest.mark.parametrize("options", [{}, {"transform": spread}, {"collate_fn": list}])
def test_batches_without_readable_samples_are_left_out(arrays, tmp_path, options):
    copy = damaged(arrays, tmp_path / "copy", [*range(10), 22, *range(40, 50)])
    loader = Loader(copy, 5, on_error="skip", **options)
    sizes = [len(batch) if "collate_fn" in options else len(batch[0]) for batch in loader]
    assert sizes == [5, 5, 4, 5, 5, 5]
    assert [error.sample for error in loader.skipped] == [*range(10), 22, *range(40, 50)]
    assert loader.state_dict() == {"epoch": 1, "sample": 0}
    passing = iter(loader)
    next(passing)
    assert loader.state_dict() == {"epoch": 1, "sample": 15}
    none = Loader(copy, 5, sampler=range(10), on_error="skip", **options)
    with pytest.raises(DataError, match="sample 0"):
        list(none)


@pytest.mark.filterwarnings("ignore:the Loader left out")
def test_rank_without_readable_samples_repeats_a_batch_with_weight_zero(arrays, tmp_path):
    copy = damaged(arrays, tmp_path / "copy", [0, 1, 2, 3, 20, 21, 22, 23])
    parts = [sharded(Loader(copy, 4, on_error="skip"), rank, 2) for rank in range(2)]
    first, second = (list(part.iterate(0)) for part in parts)
    assert len(first) == len(second) == 7
    assert [share.filler for _, share in first] == [k in (0,) for k in range(7)]
    assert [share.filler for _, share in second] == [k in (2,) for k in range(7)]
    assert torch.equal(first[0][0][0], first[1][0][0])
    assert torch.equal(second[2][0][0], second[1][0][0])
    once = [
        sharded(Loader(copy, 4, on_error="skip"), rank, 2, every_sample_once=True)
        for rank in range(2)
    ]
    seen = [len(x) for part in once for (x, _), _ in part.iterate(0)]
    assert sum(seen) == 42
    bad = sharded(Loader(copy, 4, sampler=range(4), on_error="skip"), 0, 1)
    with pytest.raises(DataError, match="sample 0"):
        list(bad.iterate(0))
