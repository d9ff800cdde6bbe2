"""Mix-up: the samples that are mixed and the resulting label."""

import numpy as np
import pytest
import sets
import torch

from paceline.data import Loader, Shards, pack
from paceline.data.loading.mixup import MixUp
from paceline.data.sampling.shard_loader import shard


def batches(loader):
    parts = list(zip(*loader, strict=True))
    return torch.cat(parts[0]), torch.cat(parts[1])


def test_samples_and_labels_are_mixed_with_same_weight():
    x, y = sets.arrays(40)
    mixed, labels = batches(Loader((x, y), 8, mix_up=0.4, seed=3))
    mixing = MixUp(Loader((x, y)).dataset, 0.4)
    assert labels.shape == (40, 7)
    assert labels.dtype == torch.float32
    assert labels.sum(1).tolist() == pytest.approx([1] * 40)
    partners = set()
    for i in range(40):
        other, share = mixing.partner(3, 0, i)
        assert 0.5 <= share <= 1
        assert mixed[i].numpy() == pytest.approx(share * x[i] + (1 - share) * x[other], abs=1e-5)
        assert labels[i, y[i]] == pytest.approx(share if y[i] != y[other] else 1)
        partners.add(other)
    assert len(partners) > 15


@pytest.mark.parametrize("threads", [0, 3])
def test_mixup_is_independent_of_world_size_and_differs_per_epoch(tmp_path, threads):
    pack(sets.images(tmp_path / "in", 24), tmp_path / "out")

    def epochs(rank, ranks):
        loader = Loader(tmp_path / "out", 12 // ranks, True, mix_up=0.2, num_workers=threads)
        agreed = {"seed": 5, "agree": lambda *_: None, "count_all": lambda n: n}
        part = shard(loader, rank=rank, ranks=ranks, **agreed)
        return [[(x.clone(), y.clone()) for x, y in part] for _ in range(2)]

    alone, several = epochs(0, 1), [epochs(rank, 3) for rank in range(3)]
    for epoch in range(2):
        for step, (x, y) in enumerate(alone[epoch]):
            assert x.dtype == torch.uint8
            assert torch.equal(x, torch.cat([part[epoch][step][0] for part in several]))
            assert torch.equal(y, torch.cat([part[epoch][step][1] for part in several]))
    assert not torch.equal(alone[0][0][1], alone[1][0][1])


def test_multi_label_classes_are_mixed(tmp_path):
    x, y = sets.arrays(30)
    seen = np.stack([np.isin(range(7), (one, 6)) for one in y]).astype(np.uint8)
    pack(zip(x, seen, strict=True), tmp_path / "out")
    source = Shards(tmp_path / "out")
    _, labels = batches(Loader(source, 10, mix_up=0.4, seed=3))
    assert labels.dtype == torch.float32
    assert labels[:, 6].tolist() == pytest.approx([1] * 30)
    mixing = MixUp(source, 0.4)
    for i in range(30):
        other, share = mixing.partner(3, 0, i)
        mixed = share * source[i][1] + (1 - share) * source[other][1]
        assert labels[i].tolist() == pytest.approx(mixed.tolist(), abs=1e-6)
    assert ((labels > 0) & (labels < 1)).any()


def test_regression_labels_and_unlabelled_samples_are_mixed():
    x, _ = sets.arrays(30)
    _, y = batches(Loader((x, x[:, 0].astype(np.float64)), 30, mix_up=1.0))
    assert y.dtype == torch.float32
    assert y.shape == (30, 4)
    assert 0 < y[:, 0].min() < y[:, 0].max() < 29
    (alone,) = Loader(x, 30, mix_up=1.0)
    assert alone[:, 0, 0].tolist() == pytest.approx(y[:, 0].tolist(), rel=1e-5)


def test_mixup_runs_after_transform(tmp_path):
    x, y = sets.arrays(20, dtype="uint8", shape=(3, 1))
    (pair,) = Loader((x, y), 20, mix_up=0.5, transform=lambda a: a.astype(np.float32) + 0.25)
    pack(x, tmp_path / "out", y)
    assert pair[0].dtype == torch.float32
    assert (pair[0][:, 0, 0] > 0.2).all()
    with pytest.raises(ValueError, match=r"can't mix bool\. HINT: use a transform to float32"):
        next(iter(Loader((x > 1, y), 4, mix_up=0.5)))


def test_invalid_mixup_inputs_are_reported():
    x, y = sets.arrays(20)
    with pytest.raises(ValueError, match=r"mix_up must be above 0; this is 0\. HINT"):
        Loader((x, y), 4, mix_up=0)
    with pytest.raises(ValueError, match="class -1 is not below 6"):
        list(Loader((x, y - 1), 20, mix_up=0.2))

    def ragged(a):
        return a[: 1 + int(a[0, 0]) % 2]

    with pytest.raises(ValueError, match=r"sample \d+ is float32 of .* HINT: use a transform that"):
        list(Loader((x, y), 20, mix_up=0.2, transform=ragged))
