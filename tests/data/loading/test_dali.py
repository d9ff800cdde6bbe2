"""A Loader whose batches are made by NVIDIA DALI, on the CPU because no GPU is available."""

import gc
import importlib.util
import os
import sys
import weakref

import numpy as np
import pytest
import ranks
import sets
import torch
from needs import need
from PIL import Image

from paceline.data import DataError, Files, Loader, Shards, pack
from paceline.data.sampling.shard_loader import ShardedLoader


@pytest.fixture
def fn():
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
    need([] if found else ["NVIDIA DALI"], "make test, or pip install 'paceline[frameworks]'")
    return pytest.importorskip("nvidia.dali.fn")


@pytest.fixture
def decoded(fn):
    return lambda samples: fn.decoders.image(samples, device="cpu")


@pytest.fixture
def augmented(fn):
    def function(samples, rng):
        images = fn.decoders.image(samples, device="cpu")
        places = {"crop_pos_x": rng.uniform(), "crop_pos_y": rng.uniform()}
        return fn.crop_mirror_normalize(
            images, crop=(12, 12), mirror=rng.coin(), output_layout="CHW", **places
        )

    return function


@pytest.fixture
def drawing(fn):
    """Return a function that uses DALI's random operators and has a second output."""

    def function(samples):
        images = fn.random_resized_crop(fn.decoders.image(samples, device="cpu"), size=(9, 9))
        return fn.flip(images, horizontal=fn.random.coin_flip()), fn.random.uniform()

    return function


def same(one, other):
    """Check that two lists of batches are equal."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("more", [{}, {"num_workers": 0}, {"prefetch_factor": 5}])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_match_loader_without_dali(images, decoded, drop_last, more):
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "drop_last": drop_last}
    loader = Loader(images, dali=decoded, **options, **more)
    usual = Loader(images, **options)
    assert len(loader) == (3 if drop_last else 4)
    for _ in range(2):
        for (x, y), (pixels, label) in zip(loader, usual, strict=True):
            assert torch.equal(y, label)
            assert x.dtype == torch.uint8
            assert x.shape == (len(y), 20, 24, 3)
            # The two JPEG decoders round differently.
            assert (x.int() - pixels.permute(0, 2, 3, 1).int()).abs().max() <= 4


def test_random_draws_depend_on_seed_epoch_and_sample_only(images, augmented):
    """Random draws depend on seed, epoch and sample, not on batch size or number of ranks."""
    shards = Shards(images)

    def by_sample(loaders, seed):
        found = {}
        for loader in loaders:
            for batch, keys in loader:
                found |= dict(zip(keys, batch[0], strict=True))
        assert len(found) == len(shards)
        return found

    def ranks(count, size):
        for rank in range(count):
            loader = Loader(shards, size // count, shuffle=True, dali=augmented)
            part = ShardedLoader(loader, rank=rank, ranks=count, seed=5)
            part._batches.begin(part.split, 0, 0, part._order(0))
            yield zip(part.loader, list(part._batches), strict=True)

    alone, three = by_sample(ranks(1, 9), 5), by_sample(ranks(3, 9), 5)
    other = by_sample(ranks(2, 4), 5)
    for key, x in alone.items():
        assert torch.equal(x, three[key])
        assert torch.equal(x, other[key])
    loader = Loader(shards, 30, dali=augmented)
    first, second = (next(iter(loader))[0] for _ in range(2))
    assert not torch.equal(first, second)  # an abandoned pass has its own epoch
    loader.set_epoch(0)
    passing = iter(loader)
    assert torch.equal(next(passing)[0], first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match=r"another pass has begun.*HINT"):
        next(passing)


@pytest.mark.parametrize("function", ["augmented", "drawing"])
def test_resumed_epoch_is_bit_identical(images, function, request):
    function = request.getfixturevalue(function)

    def made(seed=1):
        return Loader(images, 4, shuffle=True, seed=seed, dali=function)

    whole = [list(loader) for loader in [made()] for _ in range(2)]
    loader = made()
    for _, _batch in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    assert state == {"epoch": 0, "sample": 12}
    fresh = made()
    fresh.load_state_dict(state)
    same(whole[0][3:], list(fresh))
    same(whole[1], list(fresh))
    loader.load_state_dict({"epoch": 1, "sample": 4})  # DALI has prefetched further batches
    same(whole[1][1:], list(loader))
    assert not torch.equal(whole[0][0][0], whole[1][0][0])
    assert not torch.equal(whole[0][0][0], next(iter(made(seed=2)))[0])
    assert not torch.equal(whole[0][0][0], whole[0][1][0])


def test_sharded_loader_resumes_on_one_rank(images, drawing):
    def part():
        loader = Loader(images, 5, shuffle=True, dali=drawing)
        return ShardedLoader(loader, rank=1, ranks=2, seed=7)

    whole = [batch for batch, _ in part().iterate(2)]
    assert [len(batch[0]) for batch in whole] == [5, 5, 5]
    same(whole[1:], [batch for batch, _ in part().iterate(2, start=1)])


def test_returned_tensors_are_not_overwritten(images, augmented):
    loader = Loader(images, 4, dali=augmented)
    kept = [x for x, _ in loader]
    before = [x.clone() for x in kept]
    for _ in range(3):
        list(loader)
    same([kept], [before])


def test_arrays_files_and_concatenated_datasets(images, fn, tmp_path):
    x, y = sets.arrays(20)
    for source in ((x, y), tmp_path / "raw", tmp_path / "zstd"):
        if not isinstance(source, tuple):
            pack((x, y), source, compress=source.name == "zstd")
        got = {}
        for z, label in Loader(source, 6, shuffle=True, dali=lambda samples: samples + 1):
            got |= {int(a[0, 0]): (a, int(b)) for a, b in zip(z, label, strict=True)}
        assert len(got) == 20
        for i in range(20):
            assert np.array_equal(got[i + 1][0], x[i] + 1)
            assert got[i + 1][1] == y[i]
    values = np.random.rand(20, 5)
    pack((x, values), tmp_path / "fields")
    labels = torch.cat([label for _, label in Loader(tmp_path / "fields", 6, dali=lambda s: s)])
    assert labels.dtype == torch.float64
    assert np.array_equal(np.sort(labels.numpy(), 0), np.sort(values, 0))
    assert sum(len(one) for one in Loader(x, 6, dali=lambda samples: samples)) == 20
    files = Files(sets.images(tmp_path / "in", 9))
    both = Loader([files, Shards(images)], 8, dali=lambda s: fn.decoders.image(s, device="cpu"))
    assert [tuple(batch.shape) for batch, _ in both][:2] == [(8, 20, 24, 3)] * 2
    assert sum(len(label) for _, label in both) == 39
    np.save(tmp_path / "one.npy", x[0])
    (tmp_path / "npy").mkdir()
    (tmp_path / "one.npy").rename(tmp_path / "npy/one.npy")
    (found,) = Loader(Files(tmp_path / "npy"), dali=lambda samples: samples)
    assert np.array_equal(found[0], x[0])


def changed(folder, sample):
    """Change a byte in the middle of a sample."""
    path, offset, length = Shards(folder).location(sample)
    data = bytearray(path.read_bytes())
    data[offset + length // 2] ^= 1
    path.write_bytes(data)


def test_corrupted_sample_raises_or_is_skipped(tmp_path, decoded):
    pack(sets.images(tmp_path / "in", 20), tmp_path / "set")
    changed(tmp_path / "set", 13)
    loader = Loader(tmp_path / "set", 5, dali=decoded)
    given = []
    with pytest.raises(DataError, match=r"sample 13 at byte .*its checksum differs"):
        given.extend(loader)
    assert len(given) == 2
    skips = Loader(tmp_path / "set", 5, dali=decoded, on_error="skip")
    with pytest.warns(UserWarning, match="left out a sample .*sample 13 "):
        got = list(skips)
    usual = torch.cat([torch.tensor([label]) for _, label in _others(tmp_path / "set", 13)])
    assert [len(x) for x, _ in got] == [5, 5, 4, 5]
    assert torch.equal(torch.cat([y for _, y in got]), usual)
    assert [error.sample for error in skips.skipped] == [13]


def _others(folder, bad):
    shards = Shards(folder)
    return [shards[i] for i in range(len(shards)) if i != bad]


def test_dali_decode_error_names_sample(tmp_path, decoded):
    def stream():
        for k in range(8):
            path = tmp_path / f"{k}.png"
            noise = np.random.default_rng(k).integers(0, 256, (30, 30, 3), np.uint8)
            Image.fromarray(noise).save(path)
            yield path.read_bytes()[: 900 if k == 5 else None]

    pack(stream(), tmp_path / "set", statistics=0)
    loader = Loader(tmp_path / "set", 3, dali=decoded)
    with pytest.raises(DataError, match=r"sample \d at byte .*can't be decoded"):
        list(loader)
    with pytest.raises(DataError, match="can't be decoded"):  # the Loader can be iterated again
        list(loader)


def test_invalid_arguments_are_reported(images, fn, decoded):
    x, _ = sets.arrays(6)

    def fails(match, **options):
        with pytest.raises(ValueError, match=match):
            list(Loader(options.pop("source", images), 4, **options))

    fails(
        r"can't be combined with transform, processes\. HINT",
        dali=decoded,
        transform=abs,
        processes=True,
    )
    fails(r"can't be combined with pin_memory\. HINT", dali=decoded, pin_memory=True)
    fails(r"must return a DataNode; this is int\. HINT", dali=lambda samples: 3)
    fails(r"this is NoneType", dali=lambda samples: None)
    fails(r"does not depend on the samples", dali=lambda samples: fn.random.uniform())
    fails(
        r"samples of different shapes: \(\d+, \d, 3\), .*HINT: use crop",
        dali=lambda samples, rng: fn.resize(decoded(samples), resize_x=rng.uniform(1, 9)),
    )

    def three(samples):
        return samples, fn.external_source(source=lambda: np.zeros((3, 2)), batch=True)

    fails(r"Batch size clash! .* a batch size 3 ", source=x, dali=three)


def test_dali_graph_is_freed_with_loader(images, decoded):
    loader = Loader(images, 4, dali=decoded)
    next(iter(loader))
    graph = weakref.ref(loader._graph[1])
    del loader
    gc.collect()
    assert graph() is None


def test_abandoned_dali_pass_ends_with_its_iterator(images, decoded):
    """The graph, which the loader keeps, does not keep the batches of the pass."""
    loader = Loader(images, 4, dali=decoded)
    whole = [label.tolist() for _, label in loader]
    passing = iter(loader)
    next(passing)
    abandoned = weakref.ref(passing)
    del passing
    gc.collect()
    assert abandoned() is None
    assert [label.tolist() for _, label in loader] == whole


def test_missing_dali_reports_install_hint(images, monkeypatch):
    for name in ("nvidia.dali", "nvidia.dali.pipeline", "nvidia.dali.fn"):
        monkeypatch.setitem(sys.modules, name, None)
    loader = Loader(images, 4, dali=lambda samples: samples)
    with pytest.raises(ValueError, match=r"DALI is not installed\. HINT: pip install nvidia-dali"):
        next(iter(loader))


def test_forked_child_makes_a_graph_of_its_own(images, decoded):
    loader = Loader(images, 8, dali=decoded)
    whole = [x.clone() for x, _ in loader]
    passing = iter(loader)
    next(passing)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            with pytest.raises(RuntimeError, match="forked during the pass"):
                next(passing)
            code = 0 if all(map(torch.equal, [x for x, _ in loader], whole)) else 1
        finally:
            os._exit(code)
    ranks.wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(passing)) == 3
