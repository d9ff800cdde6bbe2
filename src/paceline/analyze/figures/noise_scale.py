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
MAX_BLOCKS = 16  # of steps, whose means are compared
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale of a run, in samples.

    Attributes:
        samples: ``tr(S) / |G|^2``; None: undetermined, because ``|G|^2`` is not above its error.
        low, high: 95 % interval; ``high`` is None if it has no upper end.
        global_batch: Samples of a step of all ranks.
        steps: Number of sampled steps.
    """

    samples: float | None
    low: float
    high: float | None
    global_batch: int
    steps: int

    @property
    def extra_samples(self) -> float | None:
        """Samples to a loss with this batch, over those with a small one (equation 2.11)."""
        return None if self.samples is None else 1 + self.global_batch / self.samples

    def steps_with(self, global_batch: float) -> float | None:
        """Return the number of steps to a loss with another batch, relative to this one's."""
        if self.samples is None:
            return None
        return (1 + self.samples / global_batch) / (1 + self.samples / self.global_batch)


def noise_scale_of(records: Sequence[Record]) -> NoiseScale | None:
    """Return the gradient noise scale of a run; None if too few common steps were sampled."""
    return estimate_noise_scale([_sampled(record) for record in records])


def estimate_noise_scale(
    ranks: Sequence[dict[int, tuple[int, float, float]]],
) -> NoiseScale | None:
    """Return the gradient noise scale; None for one rank, or too few common steps.

    Args:
        ranks: For each rank by sampled step: samples, squared norm of its gradient, and its part of
            the squared norm of all ranks' gradient.
    """
    if len(ranks) < 2:
        return None
    steps = sorted(set.intersection(*(set(rank) for rank in ranks)))
    rows = np.array([[rank[step] for rank in ranks] for step in steps], np.float64)
    if len(rows):
        # a rank with another number of samples has a weight that is not known here
        counts = rows[:, :, 0]
        usual = np.median(counts)
        rows = rows[(counts == usual).all(axis=1)]
    if len(rows) < MIN_SAMPLED_STEPS:
        return None
    small, each = float(usual), len(ranks)
    big = small * each
    of_rank, of_all = rows[:, :, 1].mean(axis=1), rows[:, :, 2].sum(axis=1)
    signal = (big * of_all - small * of_rank) / (big - small)  # |G|^2
    noise = (of_rank - of_all) / (1 / small - 1 / big)  # tr(S)
    low, high = _interval(signal, noise)
    mean = float(signal.mean())
    samples = max(float(noise.mean()), 0.0) / mean if mean > 0 and high is not None else None
    return NoiseScale(samples, low, high, round(big), len(rows))


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
    (var_x, both), (_, var_y) = np.cov(x, y) / blocks
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
