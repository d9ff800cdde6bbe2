"""Loaders of packed volumes give each rank its part, and one rank compares each checksum."""

from collections import Counter

import numpy as np
import pytest
import thread_ranks
import torch

from paceline.data import Loader, Shards, pack


@pytest.mark.parametrize(("layout", "ranks"), [("d2", 2), ("h2 x w2", 4)])
def test_packed_volumes_are_read_in_parts(tmp_path, monkeypatch, layout, ranks):
    x = np.random.default_rng(0).normal(size=(8, 1, 4, 6, 5)).astype(np.float32)
    pack(x, tmp_path / "packed", np.arange(8 * 120).reshape(8, 4, 6, 5))
    known = Shards(tmp_path / "packed")
    checked, check = Counter(), Shards.check_sample
    monkeypatch.setattr(
        Shards, "check_sample", lambda one, i, *rest: checked.update([i]) or check(one, i, *rest)
    )
    monkeypatch.setattr(Shards, "read", lambda *_: pytest.fail("a sample is read whole"))

    def train(world):
        world.distribute(torch.nn.Conv3d(1, 1, 1), layout=layout, compare=False)
        loader = world.shard(Loader(tmp_path / "packed", 2), global_batch=2)
        found = []
        for a, b in world.batches(loader):
            assert a.local.numel() < a.numel()
            assert b.local.numel() < b.numel()
            found += zip(world.whole(a), world.whole(b), strict=True)
        return found

    for found in thread_ranks.run(train, ranks):
        assert len(found) == 8
        monkeypatch.undo()
        for (a, b), (array, label) in zip(found, (known[i] for i in range(8)), strict=True):
            np.testing.assert_array_equal(a, array)
            np.testing.assert_array_equal(b, label)
    assert checked == Counter(dict.fromkeys(range(8), 1))


def test_labels_of_one_number_are_whole(tmp_path):
    x, y = np.zeros((4, 1, 4, 6, 5), np.float32), np.arange(4, dtype=np.float32) / 3
    pack(x, tmp_path / "packed", y)

    def train(world):
        world.distribute(torch.nn.Conv3d(1, 1, 1), layout="h2", compare=False)
        loader = world.shard(Loader(tmp_path / "packed", 2), global_batch=2)
        return torch.cat([labels for _, labels in world.batches(loader)])

    for found in thread_ranks.run(train):
        np.testing.assert_array_equal(found.sort()[0], y)
