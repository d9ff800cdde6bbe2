"""Transforms: what they do to an array, the same for the same generator."""

import numpy as np
import pytest

import sets
from paceline.data import Loader, Shards, pack
from paceline.data.transforms import (
    Chain,
    Channels,
    Crop,
    Flip,
    Normalise,
    Resize,
    ResizedCrop,
    Turn,
)

IMAGE = np.arange(20 * 24 * 3, dtype=np.uint16).reshape(20, 24, 3)


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_crop_is_a_part_from_anywhere():
    seen = set()
    for seed in range(40):
        part = Crop((8, 10))(IMAGE, rng(seed))
        top, left = np.argwhere(IMAGE[:, :, 0] == part[0, 0, 0])[0]
        assert np.array_equal(part, IMAGE[top : top + 8, left : left + 10])
        seen.add((top, left))
    assert len(seen) > 20
    assert np.array_equal(Crop((8, 10), middle=True)(IMAGE, rng()), IMAGE[6:14, 7:17])


def test_a_patch_of_a_larger_field_is_cut_along_any_axes():
    field = np.arange(2 * 5 * 6 * 7).reshape(2, 5, 6, 7)
    patch = Crop((3, 3, 3), axes=(1, 2, 3))(field, rng(1))
    assert patch.shape == (2, 3, 3, 3)
    assert patch[1, 0, 0, 0] - patch[0, 0, 0, 0] == 5 * 6 * 7


def test_padding_is_of_zeros():
    part = Crop((20, 24), pad=4)(IMAGE + 1, rng(3))
    assert part.shape == IMAGE.shape
    assert (part == 0).any()
    with pytest.raises(ValueError, match=r"Crop: 30 along axis 0 .* HINT: Resize before it"):
        Crop((30, 4))(IMAGE, rng())


def test_flips_and_turns_keep_all_values():
    flipped = [Flip()(IMAGE, rng(seed)) for seed in range(40)]
    assert any(np.array_equal(one, IMAGE) for one in flipped)
    assert any(np.array_equal(one, IMAGE[:, ::-1]) for one in flipped)
    turned = [Turn()(IMAGE, rng(seed)) for seed in range(40)]
    assert {one.shape for one in turned} == {(20, 24, 3), (24, 20, 3)}
    assert all(np.array_equal(np.sort(one.ravel()), np.sort(IMAGE.ravel())) for one in turned)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_resampling_keeps_means_and_the_dtype(dtype):
    smooth = np.linspace(0, 200, 40 * 48).reshape(40, 48, 1).repeat(3, 2).astype(dtype)
    made = Resize((10, 12))(smooth, rng())
    assert made.shape == (10, 12, 3)
    assert made.dtype == dtype
    assert made.mean() == pytest.approx(smooth.mean(), abs=1.5)
    assert ResizedCrop((7, 9))(smooth, rng(2)).shape == (7, 9, 3)
    assert np.array_equal(Channels([2, 0])(IMAGE, rng()), IMAGE[:, :, [2, 0]])


def test_a_set_is_normalised_by_its_own_statistics(tmp_path):
    pack(sets.images(tmp_path / "in", 30), tmp_path / "out")
    loader = Loader(tmp_path / "out", 30, transform=Normalise.of(Shards(tmp_path / "out")))
    images, _ = next(iter(loader))
    assert images.shape == (30, 3, 20, 24)
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-4)
    assert images.std((0, 2, 3)).tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    pack(np.zeros((3, 2)), tmp_path / "none", statistics=0)
    with pytest.raises(ValueError, match=r"has no statistics\. HINT: paceline pack --statistics"):
        Normalise.of(Shards(tmp_path / "none"))


def test_a_chain_is_the_same_on_any_number_of_threads(tmp_path):
    pack(sets.images(tmp_path / "in", 30), tmp_path / "out")
    chain = Chain(ResizedCrop((16, 16)), Flip(), Turn(), Normalise(128.0, 64.0))
    found = [
        [x for x, _ in Loader(tmp_path / "out", 8, num_workers=threads, transform=chain)]
        for threads in (0, 3)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
