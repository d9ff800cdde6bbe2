"""Plan of a scaling study: the setups of its sizes, the script's arguments, steps and repeats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...analyze.scaling.study_folder import PlannedPoint
from ...analyze.scaling.study_model import (
    STRONG,
    WEAK,
    BatchSource,
    Setup,
    StudyRequest,
    data_ranks,
)
from ...cost.layout import Layout
from ..trials import SEED

PER_RANK, GLOBAL, RANKS = "{per_rank}", "{global}", "{ranks}"
FIRST_STEPS = 12  # of the first run, which measures the duration of a step
LEAST_STEPS, MOST_STEPS = 20, 400  # measured steps of a run, unless --steps says otherwise
WARM_UP_SHARE = 0.25  # of the measured steps: further steps, for the warm-up that is dropped
LEAST_WARM_UP = 5
USED_SHARE = 0.8  # of the time: for runs that take longer than expected
DEFAULT_MINUTES = 10.0
# A run may take this factor of the time that is expected, and at least this time, before it counts
# as failed.
RUN_LIMIT_FACTOR, MIN_RUN_LIMIT_S = 6.0, 120.0


def run_limit_s(expected_s: float) -> float:
    """Return the time after which a run counts as failed."""
    return max(MIN_RUN_LIMIT_S, RUN_LIMIT_FACTOR * expected_s)


@dataclass(frozen=True)
class Cost:
    """Expected cost of runs.

    Attributes:
        start_s: Time of a run outside of its steps.
        step_s: Duration of a step at the smallest size.
    """

    start_s: float
    step_s: float

    def run_s(self, steps: int) -> float:
        return self.start_s + steps * self.step_s


def uses_template(args: Sequence[str]) -> bool:
    """Return whether the script's arguments contain the batch."""
    return any(PER_RANK in word or GLOBAL in word for word in args)


def filled_in(args: Sequence[str], setup: Setup, seed: int, parts: int = 1) -> list[str]:
    """Return the script's arguments for one run. parts: As in ``StudyRun``."""
    values = {
        PER_RANK: setup.rank_batch // parts,
        GLOBAL: setup.global_batch // parts,
        RANKS: setup.ranks,
        SEED: seed,
    }
    filled = list(args)
    for name, value in values.items():
        filled = [word.replace(name, str(value)) for word in filled]
    return filled


def plan_points(request: StudyRequest, batch: BatchSource, parts: int = 1) -> list[PlannedPoint]:
    """Return all sizes of all kinds with their setups.

    Args:
        request: The study's request.
        batch: Has the batch of the smallest size.
        parts: As in ``StudyRun``; every size divides a part.

    Raises:
        ValueError: The sizes do not divide the batch.
    """
    sizes = sorted(set(request.sizes))
    base = batch.base
    shares = {size: data_ranks(request.layout, size) for size in sizes}
    first = shares[sizes[0]]
    divisor = parts * math.lcm(*(shares.values() if STRONG in request.kinds else (first,)))
    if base % divisor:
        bad = [n for n in dict.fromkeys(shares.values()) if base % (parts * n)] or [first]
        who = "data ranks" if request.layout else "ranks"
        split = f", in {parts} batches a step," if parts > 1 else ""
        below = base // divisor * divisor
        near = " or ".join(str(batch) for batch in (below, below + divisor) if batch)
        raise ValueError(
            f"a global batch of {base}{split} can't be divided by {', '.join(map(str, bad))} "
            f"{who}. HINT: --global-batch {below + divisor} (nearest that all sizes divide: {near})"
        )
    points = []
    for kind in (STRONG, WEAK):
        if kind in request.kinds:
            points += [
                PlannedPoint(
                    kind,
                    new_setup(
                        request, size, base if kind == STRONG else base // first * shares[size]
                    ),
                )
                for size in sizes
            ]
    return points


def new_setup(request: StudyRequest, ranks: int, global_batch: int) -> Setup:
    """Return a setup in the study's layout.

    Raises:
        ValueError: The layout does not fit the number of ranks.
    """
    layout = str(Layout.parse(request.layout).over(ranks)) if request.layout else ""
    return Setup(ranks, global_batch, layout)


def setups_of(points: Sequence[PlannedPoint]) -> list[Setup]:
    """Return the setups of points, each once, by ranks."""
    return sorted(
        dict.fromkeys(point.setup for point in points), key=lambda s: (s.ranks, s.global_batch)
    )


def total_steps(measured: int) -> int:
    """Return all steps of a run: the measured ones, and those of the warm-up."""
    return 1 + measured + max(LEAST_WARM_UP, math.ceil(WARM_UP_SHARE * measured))


def choose_steps(request: StudyRequest, runs: Sequence[Cost], left_s: float) -> int:
    """Return the number of measured steps of each run: as asked, or from the time that is left.

    Args:
        request: The study's request.
        runs: Cost of each run that is planned.
        left_s: Time for all of them.
    """
    if request.steps is not None:
        return request.steps
    steps_s = USED_SHARE * left_s - sum(run.start_s for run in runs)
    each_s = (1 + WARM_UP_SHARE) * sum(run.step_s for run in runs)
    return min(max(int(steps_s / max(each_s, 1e-9)), LEAST_STEPS), MOST_STEPS)
