"""Sketches of tensors."""

import numpy as np
import torch

from paceline.observe.facts.ranks import CHECKSUM, NONFINITE, SKETCH_SIZE, SQUARES
from paceline.observe.observation import SketchTable, sketch


def values(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_sketch_of_a_mean_is_the_mean_of_the_sketches():
    one, other = values(1000, 0), values(1000, 1)
    mean = (sketch(one) + sketch(other))[:SKETCH_SIZE] / 2
    assert np.allclose(mean, sketch((one + other) / 2)[:SKETCH_SIZE], rtol=1e-12)


def test_sketch_of_a_tensor_is_the_sum_of_its_shards():
    whole = values(1000, 0)
    parts = sketch(whole[:300]) + sketch(whole[300:], 300)
    assert np.allclose(parts[: SQUARES + 1], sketch(whole)[: SQUARES + 1], rtol=1e-12)


def test_checksum_depends_on_each_value_and_its_place():
    whole = values(1000, 0)
    changed = whole.clone()
    changed[500] = changed[500].nextafter(torch.tensor(10.0, dtype=torch.float64))
    swapped = whole[torch.randperm(1000)]
    checksums = {sketch(one)[CHECKSUM] for one in (whole, changed, swapped)}
    assert len(checksums) == 3
    assert sketch(whole.clone())[CHECKSUM] == sketch(whole)[CHECKSUM]


def test_elements_that_are_not_finite_are_counted():
    row = sketch(torch.tensor([1.0, float("nan"), float("inf")]))
    assert row[NONFINITE] == 2
    assert row[SQUARES] == 1


def test_sketch_draws_no_random_numbers_and_ignores_the_default_device():
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        row = sketch(torch.ones(3, device="cpu"))
    assert row[SQUARES] == 3
    assert torch.equal(before, torch.random.get_rng_state())


def test_row_of_a_sum():
    table, one, other = SketchTable(), values(100, 0), values(100, 1)
    table.add_sum(table.add(one), table.add(other))
    expected = sketch(one + other)[:SKETCH_SIZE]
    assert np.allclose(table.array()[-1][:SKETCH_SIZE], expected, rtol=1e-9)
