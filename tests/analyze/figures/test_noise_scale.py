"""The gradient noise scale: its estimate, its interval, and when it is undetermined."""

import numpy as np
import pytest

from paceline.analyze.figures.noise_scale import (
    NoiseScale,
    estimate_noise_scale,
    noise_scale_of_steps,
    sampled_steps,
)

DIMS, SIGNAL, NOISE = 400, 2.0, 600.0  # |G|^2, tr(S): the noise scale is 300


def sampled(ranks, steps, batch, signal=SIGNAL, seed=0):
    """Return the squared norms of gradients with a known mean and variance."""
    draw = np.random.default_rng(seed)
    mean = np.full(DIMS, np.sqrt(signal / DIMS))
    found = [{} for _ in range(ranks)]
    for step in range(steps):
        each = mean + draw.normal(0, np.sqrt(NOISE / DIMS / batch), (ranks, DIMS))
        whole = float((each.mean(axis=0) ** 2).sum())
        for rank, gradient in zip(found, each, strict=True):
            rank[step] = batch, float((gradient**2).sum()), whole / ranks
    return found


def test_estimate_and_interval_hold_the_known_value():
    inside = 0
    for seed in range(40):
        found = estimate_noise_scale(sampled(4, 60, 16, seed=seed))
        assert type(found.low) is type(found.high) is float  # users print them
        inside += found.low <= NOISE / SIGNAL <= found.high
        assert found.samples == pytest.approx(300, rel=0.5)
        assert (found.global_batch, found.steps) == (64, 60)
    assert inside >= 35


def test_gradient_below_its_noise_is_undetermined():
    found = estimate_noise_scale(sampled(2, 20, 4, signal=0.0, seed=1))
    assert found.samples is None
    assert found.high is None
    assert found.steps_with(100) is None


def test_only_ranks_with_samples_of_their_own_count():
    ranks = sampled(2, 60, 16)
    halves = [{step: (n, own, all_ / 2) for step, (n, own, all_) in rank.items()} for rank in ranks]
    alike = [halves[0], halves[0], halves[1], halves[1]]  # two model-parallel ranks of each
    found = noise_scale_of_steps(sampled_steps(alike, [[0, 1], [2, 3]]))
    assert found == estimate_noise_scale(ranks)
    # context-parallel ranks have gradients of parts of their samples: that of all is not known
    parts = sampled(4, 60, 16)
    assert noise_scale_of_steps(sampled_steps(parts, [[0, 1], [2, 3]])) is None
    assert noise_scale_of_steps(sampled_steps(alike, [[0, 1, 2, 3]])) is None


def test_batches_of_a_schedule_count_each_with_its_size():
    ranks = [
        one | {step + 60: row for step, row in other.items()}
        for one, other in zip(sampled(4, 60, 16), sampled(4, 60, 64, seed=1), strict=True)
    ]
    found = estimate_noise_scale(ranks)
    assert found.samples == pytest.approx(300, rel=0.5)
    assert (found.global_batch, found.steps) == (256, 120)


def test_steps_follow_the_papers_curve():
    found = NoiseScale(100.0, 90.0, 110.0, global_batch=100, steps=50)
    assert found.steps_with(200) == pytest.approx(0.75)
    assert found.steps_with(1e12) == pytest.approx(0.5)


def test_only_common_steps_with_equal_batches_count():
    ranks = sampled(2, 30, 16)
    del ranks[0][3]
    ranks[1][5] = 9, *ranks[1][5][1:]  # an uneven last batch
    assert estimate_noise_scale(ranks).steps == 28
    assert estimate_noise_scale(ranks[:1]) is None
    assert estimate_noise_scale([dict(list(rank.items())[:7]) for rank in ranks]) is None
