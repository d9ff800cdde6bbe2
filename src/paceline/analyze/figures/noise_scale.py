"""The gradient noise scale: the batch size from which on larger batches gain little.

McCandlish, Kaplan, Amodei 2018, arXiv 1812.06162, appendix A.1: the squared norm of a gradient of b
samples is on average ``|G|^2 + tr(S) / b``. Two batch sizes (a rank's, and all ranks') give both
unknowns, whose estimates are unbiased; their ratio is not, so each is averaged over the steps, and
divided last: ``B = tr(S) / |G|^2``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...record.ring.states import SQUARE_OFFSET, SQUARE_UNIT, State
from ...significance import student_quantile
from ..records.read_record import Record

MIN_SAMPLED_STEPS = 8
TAIL = 0.025  # outside of the interval, on each side
SAME_GRADIENT = 1e-4  # relative difference of squared norms up to which gradients are the same
MAX_BLOCKS = 16  # of steps, whose means are compared
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale of a run, in samples.

    Attributes:
        samples: ``tr(S) / |G|^2``; None: undetermined, because ``|G|^2`` is not above its error.
        low, high: 95 % interval; ``high`` is None if it has no upper end.
        global_batch: Samples of a step of all ranks, in the last sampled step.
        steps: Number of sampled steps.
    """

    samples: float | None
    low: float
    high: float | None
    global_batch: int
    steps: int

    def steps_with(self, global_batch: float) -> float | None:
        """Return the number of steps to a loss with another batch, relative to this one's."""
        if self.samples is None:
            return None
        return (1 + self.samples / global_batch) / (1 + self.samples / self.global_batch)


def estimate_noise_scale(ranks: Sequence[dict[int, tuple[int, float, float]]]) -> NoiseScale | None:
    """Return the gradient noise scale from the sampled steps of each rank."""
    return noise_scale_of_steps(sampled_steps(ranks))


def recorded_steps(
    records: Sequence[Record], shards: Sequence[Sequence[int]] | None = None
) -> Floats:
    """Return the sampled steps of a run, as ``sampled_steps``.

    Args:
        records: Those of all ranks.
        shards: Indices of the records that train the same samples; None: all train other samples.
    """
    return sampled_steps([_sampled(record) for record in records], shards)


def sampled_steps(
    ranks: Sequence[dict[int, tuple[int, float, float]]],
    shards: Sequence[Sequence[int]] | None = None,
) -> Floats:
    """Return what the common sampled steps of all ranks have measured.

    Args:
        ranks: For each rank by sampled step: samples, squared norm of its gradient, and its part of
            the squared norm of all ranks' gradient.
        shards: Ranks that train the same samples; None: each has its own. The gradient of a shard's
            samples is only known if its ranks have the same one.

    Returns:
        Array [steps, 4]: samples of the small and of the large batch, and the squared norms of
        their gradients. Empty if there is only one batch size.
    """
    shards = [[i] for i in range(len(ranks))] if shards is None else shards
    if len(shards) < 2:
        return np.empty((0, 4))
    steps = sorted(set.intersection(*(set(rank) for rank in ranks)))
    if not steps:
        return np.empty((0, 4))
    each = np.array([[rank[step] for rank in ranks] for step in steps], np.float64)
    counts, before = each[:, :, 0], each[:, :, 1]
    # a rank with another number of samples has a weight that is not known here
    usable = (counts == counts[:, :1]).all(axis=1)
    for shard in shards:
        part = before[:, list(shard)]
        usable &= np.isclose(part, part[:, :1], rtol=SAME_GRADIENT).all(axis=1)
    of_shards = before[:, [shard[0] for shard in shards]].mean(axis=1)
    small, of_all = counts[:, 0], each[:, :, 2].sum(axis=1)
    rows = np.stack([small, small * len(shards), of_shards, of_all], axis=1)
    return np.asarray(rows[usable], np.float64)


def noise_scale_of_steps(rows: Floats) -> NoiseScale | None:
    """Return the gradient noise scale of sampled steps; None if there are too few.

    The batch may change between steps (a batch schedule); batches of a few steps, such as the last
    one of an epoch, are left out.
    """
    sizes, inverse, counts = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
    rows = rows[counts[inverse.reshape(-1)] >= MIN_SAMPLED_STEPS] if len(sizes) else rows
    if len(rows) < MIN_SAMPLED_STEPS:
        return None
    small, big, of_rank, of_all = rows.T
    signal = (big * of_all - small * of_rank) / (big - small)  # |G|^2
    noise = (of_rank - of_all) / (1 / small - 1 / big)  # tr(S)
    low, high = _interval(signal, noise)
    mean = float(signal.mean())
    samples = max(float(noise.mean()), 0.0) / mean if mean > 0 and high is not None else None
    return NoiseScale(samples, low, high, round(float(big[-1])), len(rows))


def _interval(signal: Floats, noise: Floats) -> tuple[float, float | None]:
    """Return the 95 % interval of the ratio of means (Fieller 1954), over blocks of steps.

    Neighbouring steps are alike, so that means of blocks are compared. Returns no upper end if the
    signal is not above its error.
    """
    blocks = min(len(signal), MAX_BLOCKS)
    x, y = (
        np.array([part.mean() for part in np.array_split(of, blocks)]) for of in (signal, noise)
    )
    mean_x, mean_y = float(x.mean()), float(y.mean())
    (var_x, both), (_, var_y) = (np.cov(x, y) / blocks).tolist()
    t2 = student_quantile(TAIL, blocks - 1) ** 2
    # r is inside if (mean_y - r mean_x)^2 <= t2 var(y - r x): a quadratic inequality in r
    a, b = mean_x**2 - t2 * var_x, mean_x * mean_y - t2 * both
    c = mean_y**2 - t2 * var_y
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a <= 0 or mean_x <= 0:
        return max((b - root) / a, 0.0) if a < 0 < mean_x else 0.0, None
    return max((b - root) / a, 0.0), max((b + root) / a, 0.0)


def _sampled(record: Record) -> dict[int, tuple[int, float, float]]:
    events = record.events_in(State.GRADIENT)
    squares = np.exp2(events["amount"] / SQUARE_UNIT - SQUARE_OFFSET)
    found: list[dict[int, tuple[int, float]]] = [{}, {}]
    for event, square in zip(events, squares.tolist(), strict=True):
        if event["op"] < 2:
            found[event["op"]][int(event["seq"])] = int(event["peer"]), square
    before, after = found
    return {step: (*before[step], after[step][1]) for step in before if step in after}
