"""Time to a target, in words."""

from collections.abc import Sequence

from ...analyze.reference.goal import Goal
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.targets import (
    NO_RULE,
    UNCHANGED,
    SizeTarget,
    cheapest,
    learning_rate_rule,
    soonest,
)
from ..numbers import amount, counted, duration


def target_sentences(sizes: Sequence[SizeTarget], goal: Goal) -> list[str]:
    """Return which size reaches the target soonest, which is cheapest, and which do not."""
    if not sizes:
        return []
    first, cheap = soonest(sizes), cheapest(sizes)
    found = []
    if first is None:
        found.append(f"No size reaches {goal} with every seed.")
    elif first.seconds is not None:
        ranks = counted(first.point.ranks, "rank")
        found.append(f"Soonest to {goal}: {ranks}, in {_span(first.seconds)}.")
    if cheap is not None and cheap.node_hours is not None:
        ranks = counted(cheap.point.ranks, "rank")
        found.append(f"Fewest node-hours: {ranks}, {amount(cheap.node_hours.value)}.")
    found += [_missed(size, goal) for size in sizes if not size.is_certain]
    return [*found, *filter(None, [learning_rate_sentence(sizes)])]


def learning_rate_sentence(sizes: Sequence[SizeTarget]) -> str:
    """Return how the learning rate follows the global batch; "" if it is not known."""
    rates = [size for size in sizes if size.learning_rate is not None]
    rule = learning_rate_rule(sizes)
    if rule is None or not rates:
        return ""
    values = ", ".join(
        f"{size.learning_rate:.4g} (batch {size.point.setup.global_batch:,})" for size in rates
    )
    if rule == UNCHANGED:
        return f"Learning rate: {values}. The script does not change it with the global batch."
    if rule == NO_RULE:
        return f"Learning rate: {values}: neither the linear nor the square-root rule."
    return f"Learning rate: {values}: the {rule} rule."


def _missed(size: SizeTarget, goal: Goal) -> str:
    best = "no value was seen" if size.best is None else f"the best value is {size.best:.6g}"
    of = f"{size.reached} of {counted(size.seeds, 'seed')}"
    ranks = counted(size.point.ranks, "rank")
    return f"With {ranks}, {of} reached {goal}; {best} (median of the seeds)."


def _span(found: Estimate) -> str:
    """Return a duration with its interval."""
    if not found.low or found.high == float("inf"):
        return duration(found.value)
    return f"{duration(found.value)} ({duration(found.low)} to {duration(found.high)})"
