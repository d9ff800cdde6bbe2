"""Time to a target value of a metric, by size (``paceline scale --until``).

Throughput alone does not say which size trains a model soonest: a larger global batch may need more
samples until the same accuracy. So the time to the target is the number of samples that a size
needs, over the samples/s that it trains.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...reference.metric import Goal, parse_goal
from ..derived import Estimate, estimate, throughput
from ..study_model import ScalingStudy, SizePoint
from .batch_advice import noise_figures, noise_of_runs

HOUR_S = 3600.0
SAME_RATE = 0.02  # relative difference of learning rates up to which a rule is said to be used
NO_RULE, LINEAR, SQUARE_ROOT, UNCHANGED = "none of the rules", "linear", "square root", "unchanged"


@dataclass(frozen=True)
class SizeTarget:
    """How one size reaches the target.

    Attributes:
        seeds: Number of runs to the target.
        reached: Number of runs that reached it.
        samples: Samples to the target, of the runs that reached it; None if none did.
        statistical_efficiency: Samples of the smallest size over those of this one.
        seconds: Samples over throughput; without start-up.
        node_hours: Nodes times hours until then.
        best: Median over all runs of the value nearest to the target.
        learning_rate: Largest learning rate of a run, median of the runs; None if not known.
        predicted_efficiency: Statistical efficiency that the gradient noise scale predicts; None if
            it is not known.
    """

    point: SizePoint
    seeds: int
    reached: int
    samples: Estimate | None
    statistical_efficiency: Estimate | None
    seconds: Estimate | None
    node_hours: Estimate | None
    best: float | None
    learning_rate: float | None
    predicted_efficiency: float | None = None

    @property
    def is_certain(self) -> bool:
        """Whether every run reached the target."""
        return 0 < self.seeds == self.reached


def goal_of(study: ScalingStudy) -> Goal | None:
    """Return the target of a study; None without one. Raises ValueError."""
    request = study.request
    return parse_goal(request.until, request.metric or None) if request.until else None


def targets(study: ScalingStudy, kind: str) -> list[SizeTarget]:
    """Return the sizes of a kind that have runs to the target, by ascending ranks."""
    goal = goal_of(study)
    if goal is None:
        return []
    found: list[SizeTarget] = []
    reference: Estimate | None = None
    for point in study.of_kind(kind):
        size = _size_target(point, goal, reference)
        if size is not None:
            reference = reference or size.samples
            found.append(size)
    band = noise_of_runs(noise_figures(study, kind))
    if band is None or not band[0] or not found:
        return found
    noise = band[0]
    first = found[0].point.setup.global_batch
    predicted = [
        (1 + first / noise) / (1 + size.point.setup.global_batch / noise) for size in found
    ]
    return [
        replace(one, predicted_efficiency=value)
        for one, value in zip(found, predicted, strict=True)
    ]


def _size_target(point: SizePoint, goal: Goal, reference: Estimate | None) -> SizeTarget | None:
    ends = [figures.to_target for figures in point.figures if figures.to_target is not None]
    if not ends:
        return None
    counts = [float(end.samples) for end in ends if end.reached and end.samples]
    samples = estimate(counts) if counts else None
    rate = throughput(point)
    seconds = samples.over(rate) if samples is not None and rate is not None else None
    bests = [end.best for end in ends if end.best is not None]
    rates = [end.learning_rate for end in ends if end.learning_rate is not None]
    efficiency = None
    if samples is not None:
        one = Estimate(1.0, 1.0, 1.0, samples.runs)
        efficiency = reference.over(samples) if reference is not None else one
    return SizeTarget(
        point,
        len(ends),
        sum(end.reached for end in ends),
        samples,
        efficiency,
        seconds,
        seconds.times(point.hosts / HOUR_S) if seconds is not None else None,
        goal.best([statistics.median(bests)]) if bests else None,
        statistics.median(rates) if rates else None,
    )


def soonest(sizes: Sequence[SizeTarget]) -> SizeTarget | None:
    """Return the size that reaches the target in the shortest time; of those that always do."""
    timed = [(size.seconds.value, size) for size in sizes if size.is_certain and size.seconds]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def cheapest(sizes: Sequence[SizeTarget]) -> SizeTarget | None:
    """Return the size that needs the fewest node-hours; of those that always reach the target."""
    costs = [(size.node_hours.value, size) for size in sizes if size.is_certain and size.node_hours]
    return min(costs, key=lambda pair: pair[0])[1] if costs else None


def learning_rate_rule(sizes: Sequence[SizeTarget]) -> str | None:
    """Return how the learning rate follows the global batch.

    None if it is not known for two sizes with different batches.
    """
    known = [
        (size.point.setup.global_batch, size.learning_rate) for size in sizes if size.learning_rate
    ]
    if len({batch for batch, _ in known}) < 2:
        return None
    (first_batch, first_rate), *others = known
    for rule, power in ((UNCHANGED, 0.0), (LINEAR, 1.0), (SQUARE_ROOT, 0.5)):
        expected = [first_rate * (batch / first_batch) ** power for batch, _ in others]
        pairs = zip(expected, others, strict=True)
        if all(math.isclose(rate, want, rel_tol=SAME_RATE) for want, (_, rate) in pairs):
            return rule
    return NO_RULE
