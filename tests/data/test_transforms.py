"""Transforms: their effect on an array, deterministic for a given generator."""

import numpy as np
import pytest
import sets
import torch

from paceline.data import Loader, Shards, pack
from paceline.data.transforms import (
    Chain,
    Channels,
    Crop,
    Flip,
    Normalise,
    Resize,
    ResizedCrop,
    Rotate,
    Turn,
    rotated,
)

IMAGE = np.arange(20 * 24 * 3, dtype=np.uint16).reshape(20, 24, 3)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_crop_position_is_random():
    seen = set()
    for seed in range(40):
        part = Crop((8, 10))(IMAGE, rng(seed))
        top, left = np.argwhere(IMAGE[:, :, 0] == part[0, 0, 0])[0]
        assert np.array_equal(part, IMAGE[top : top + 8, left : left + 10])
        seen.add((top, left))
    assert len(seen) > 20
    assert np.array_equal(Crop((8, 10), middle=True)(IMAGE, rng()), IMAGE[6:14, 7:17])


def test_crop_along_any_axes():
    field = np.arange(2 * 5 * 6 * 7).reshape(2, 5, 6, 7)
    patch = Crop((3, 3, 3), axes=(1, 2, 3))(field, rng(1))
    assert patch.shape == (2, 3, 3, 3)
    assert patch[1, 0, 0, 0] - patch[0, 0, 0, 0] == 5 * 6 * 7


def test_crop_pads_with_zeros():
    part = Crop((20, 24), pad=4)(IMAGE + 1, rng(3))
    assert part.shape == IMAGE.shape
    assert (part == 0).any()
    with pytest.raises(
        ValueError, match=r"Crop: the size 30 along axis 0 .* HINT: use Resize before"
    ):
        Crop((30, 4))(IMAGE, rng())


@pytest.mark.parametrize(("size", "pad"), [((20, 24), 4), ((26, 3), 5), ((2, 30), 22)])
def test_padded_crop_matches_crop_of_padded_image(size, pad):
    wide = np.pad(IMAGE, [(pad, pad), (pad, pad), (0, 0)])
    for seed in range(30):
        part = Crop(size, pad=pad)(IMAGE, rng(seed))
        assert np.array_equal(part, Crop(size)(wide, rng(seed)))


def test_flip_and_turn_preserve_values():
    flipped = [Flip()(IMAGE, rng(seed)) for seed in range(40)]
    assert any(np.array_equal(one, IMAGE) for one in flipped)
    assert any(np.array_equal(one, IMAGE[:, ::-1]) for one in flipped)
    turned = [Turn()(IMAGE, rng(seed)) for seed in range(40)]
    assert {one.shape for one in turned} == {(20, 24, 3), (24, 20, 3)}
    assert all(np.array_equal(np.sort(one.ravel()), np.sort(IMAGE.ravel())) for one in turned)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_rotation_by_any_angle(dtype):
    square = np.random.default_rng(0).integers(0, 200, (9, 9, 3)).astype(dtype)
    assert np.abs(rotated(square, 90) - np.rot90(square).astype(float)).max() <= 1
    x = np.linspace(0, 200, 30 * 40).reshape(30, 40, 1).repeat(3, 2).astype(dtype)
    there, back = rotated(x, 20), rotated(rotated(x, 20), -20)
    assert there.shape == x.shape
    assert there.dtype == dtype
    middle = np.s_[12:18, 15:25]
    assert back[middle].astype(float) == pytest.approx(x[middle].astype(float), abs=3)
    assert there[0, 0].tolist() == [0, 0, 0]
    assert rotated(x, 20, fill=7)[0, 0].tolist() == [7, 7, 7]
    fields = np.moveaxis(x, 2, 0)  # channels first
    turned = np.moveaxis(rotated(fields, 20, axes=(1, 2)), 0, 2)
    assert turned[middle].astype(float) == pytest.approx(there[middle].astype(float), abs=1.5)


def test_rotation_angles_are_drawn_in_both_directions():
    x = np.zeros((21, 21, 1), np.float32)
    x[10, 10:] = 1  # a line from the center to the right
    ends = [Rotate(40)(x, rng(seed))[:, 18].argmax() for seed in range(30)]
    assert min(ends) < 9
    assert max(ends) > 11
    assert all(3 <= end <= 17 for end in ends)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_resize_preserves_mean_and_dtype(dtype):
    smooth = np.linspace(0, 200, 40 * 48).reshape(40, 48, 1).repeat(3, 2).astype(dtype)
    made = Resize((10, 12))(smooth, rng())
    assert made.shape == (10, 12, 3)
    assert made.dtype == dtype
    assert made.mean() == pytest.approx(smooth.mean(), abs=1.5)
    assert ResizedCrop((7, 9))(smooth, rng(2)).shape == (7, 9, 3)
    assert np.array_equal(Channels([2, 0])(IMAGE, rng()), IMAGE[:, :, [2, 0]])


def test_normalise_with_dataset_statistics(tmp_path):
    pack(sets.images(tmp_path / "in", 30), tmp_path / "out")
    loader = Loader(tmp_path / "out", 30, transform=Normalise.of(Shards(tmp_path / "out")))
    images, _ = next(iter(loader))
    assert images.shape == (30, 3, 20, 24)
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert images.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    pack(np.zeros((3, 2)), tmp_path / "none", statistics=0)
    with pytest.raises(ValueError, match=r"has no statistics\. HINT: paceline pack --statistics"):
        Normalise.of(Shards(tmp_path / "none"))


def test_chain_is_independent_of_thread_count(tmp_path):
    pack(sets.images(tmp_path / "in", 30), tmp_path / "out")
    chain = Chain(ResizedCrop((16, 16)), Flip(), Turn(), Normalise(128.0, 64.0))
    found = [
        [x for x, _ in Loader(tmp_path / "out", 8, num_workers=threads, transform=chain)]
        for threads in (0, 3)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("threads", [0, 3])
def test_albumentations_are_seeded_per_sample(images, threads):
    import albumentations

    steps = [albumentations.RandomCrop(12, 12), albumentations.HorizontalFlip(p=0.5)]
    both = albumentations.Compose(steps)

    def epochs(order):
        loader = Loader(images, 5, sampler=order, transform=both, seed=4, num_workers=threads)
        return [torch.cat([x.clone() for x, _ in loader]) for _ in range(2)]

    first, second = epochs(range(30))
    assert first.shape == (30, 3, 12, 12)
    assert not torch.equal(first, second)
    assert torch.equal(epochs(range(29, -1, -1))[0], first.flip(0))
