"""Choose the number of rounds and steps that fit into the time of a diagnosis."""

import math
from dataclasses import dataclass, replace

LEAST_STEPS, MOST_STEPS = 10, 400
BURST = 16  # steps; longer bursts are ignored
MIN_STEPS_SHORT_RUN = 3  # if the script ends early, or the budget does not allow LEAST_STEPS
STEP_SHARE_OF_BUDGET = 0.6  # the rest is for starting the runs
PLANNED_SHARE = 0.85  # of the time: a round that is longer than planned must not cost the last one
# A run may take this factor of the time that is expected, and at least this time, before it counts
# as failed.
RUN_LIMIT_FACTOR, MIN_RUN_LIMIT_S = 5.0, 60.0


def run_limit_s(expected_s: float) -> float:
    """Return the time after which a run counts as failed."""
    return max(MIN_RUN_LIMIT_S, RUN_LIMIT_FACTOR * expected_s)


@dataclass(frozen=True)
class Plan:
    """Steps of each phase of the next round.

    Attributes:
        warm: Warm-up steps.
        steps: Measured steps.
    """

    warm: int
    steps: int


@dataclass(frozen=True)
class RoundCost:
    """What a round of the ladder costs.

    Attributes:
        start_s: Start-up of the processes of all its runs.
        step_s: Duration of a step.
        phases: Number of phases with steps, over all its runs.
    """

    start_s: float
    step_s: float
    phases: int

    def steps_within(self, seconds: float) -> int:
        """Return the number of steps of each phase, with warm-up, of a round of this duration."""
        return int(max(seconds - self.start_s, 0.0) / (self.phases * self.step_s))

    def duration_s(self, steps: int) -> float:
        """Return the duration of a round with ``steps`` steps, with warm-up, in each phase."""
        return self.start_s + self.phases * steps * self.step_s


def first_plan(
    left_s: float, cost: RoundCost, warm: int, workers: int, rounds: tuple[int, int]
) -> Plan:
    """Return the plan for the rounds of a ladder.

    More rounds are better than longer phases, because each round starts new processes: there are as
    many rounds as leave enough of the time for steps. If LEAST_STEPS do not fit, phases become
    shorter, and then rounds fewer.

    Args:
        left_s: Time for all rounds.
        cost: Cost of a round.
        warm: Requested number of warm-up steps.
        workers: Number of workers of a rank's loader.
        rounds: Minimum and maximum number of rounds.
    """
    left_s *= PLANNED_SHARE
    wanted = int((1 - STEP_SHARE_OF_BUDGET) * left_s / max(cost.start_s, 0.1))
    for number in range(min(max(wanted, rounds[0]), rounds[1]), rounds[0] - 1, -1):
        steps = cost.steps_within(left_s / number) - warm
        if steps >= LEAST_STEPS:
            return Plan(warm, in_bursts(min(MOST_STEPS, steps), workers))
    for number in range(rounds[0], 0, -1):
        plan = _short_plan(cost.steps_within(left_s / number), warm, workers)
        if plan is not None:
            return plan
    return Plan(1, MIN_STEPS_SHORT_RUN)


def next_plan(
    plan: Plan, took_s: float, left_s: float, cost: RoundCost, missing: int, workers: int
) -> Plan | None:
    """Return the plan of the next round; None if no further round fits.

    Args:
        plan: Plan of the last round.
        took_s: Duration of the last round.
        left_s: Time for all further rounds.
        cost: Cost of a round.
        missing: Number of rounds that are needed still; 0 if there are enough.
        workers: Number of workers of a rank's loader.
    """
    if took_s * max(missing, 1) <= left_s:
        return plan
    if not missing:
        return None
    each_s = max(took_s - cost.start_s, 0.1) / (plan.warm + plan.steps)  # of all phases together
    for number in range(missing, 0, -1):
        if number < missing and took_s * number <= left_s:
            return plan
        steps = int((left_s / number - cost.start_s) / each_s)
        short = _short_plan(steps, plan.warm, workers)
        if short is not None and short.steps < plan.steps:
            return short
    return None


def _short_plan(steps: int, warm: int, workers: int) -> Plan | None:
    """Divide a number of steps into warm-up and measured ones; None if they are too few."""
    warm = min(warm, max(1, steps // 3))
    if steps - warm < MIN_STEPS_SHORT_RUN:
        return None
    return Plan(warm, in_bursts(min(steps - warm, LEAST_STEPS), workers))


def fit_into_script(plan: Plan, done: int, phases: int) -> Plan | None:
    """Shorten the phases so that all of them fit into a script that ends after ``done`` steps.

    Args:
        plan: Plan that did not fit.
        done: Number of steps of the script.
        phases: Most phases with steps in one run.

    Returns:
        None if no shorter plan fits.
    """
    each = done // phases
    warm = plan.warm if each >= 2 * plan.warm else max(1, each // 3)
    if each - warm < min(MIN_STEPS_SHORT_RUN, plan.steps) or each >= plan.warm + plan.steps:
        return None
    return replace(plan, warm=warm, steps=each - warm)


def in_bursts(steps: int, burst: int) -> int:
    """Round the number of steps up to a multiple of ``burst``, if that is at most BURST.

    Loader workers with equal speed deliver their batches together, in bursts. A part of a burst
    would contain either the whole wait for it, or none.
    """
    return math.ceil(steps / burst) * burst if 1 < burst <= BURST else steps
