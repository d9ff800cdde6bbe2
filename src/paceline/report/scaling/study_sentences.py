"""A scaling study in sentences: fits, predictions, time to a target, batches, failures."""

from collections.abc import Sequence

from ...analyze.reference.goal import Goal
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.batch_advice import Band, BatchAdvice
from ...analyze.scaling.outcomes.targets import (
    NO_RULE,
    UNCHANGED,
    SizeTarget,
    cheapest,
    learning_rate_rule,
    soonest,
)
from ..numbers import amount, counted, duration, percent
from .findings import CheckedPrediction, Fit, FittedParameter
from .size_rows import SizeRow

MAX_SHOWN_PARAMETERS = 3  # of a fit; the cost model has more, which are on the page


def failures(rows: Sequence[SizeRow]) -> list[str]:
    """Return why sizes have no figures, in the words of the script."""
    found = []
    for row in rows:
        if row.point.failure and row.throughput is None:
            first = row.point.failure.strip().partition("\n")[0]
            found.append(f"{counted(row.point.ranks, 'rank')}: {first}")
    return found


def fit_sentence(fit: Fit) -> str:
    """Return the few parameters of a law with their intervals, and the error of the fit."""
    parameters = ""
    if 0 < len(fit.parameters) <= MAX_SHOWN_PARAMETERS:
        parameters = ", ".join(map(_parameter_words, fit.parameters)) + "; "
    if fit.error is None:
        error = "fewer than four sizes: the fit cannot be tested"
    else:
        error = f"leave-one-out error {percent(fit.error)}"
        error += f", at most {percent(fit.worst)}" if fit.worst is not None else ""
    return f"{fit.model}: {parameters}{error}{f'; {fit.note}' if fit.note else ''}"


def _parameter_words(one: FittedParameter) -> str:
    show = amount if one.unit == "samples/s" else "{:.3g}".format
    unit = f" {one.unit}" if one.unit else ""
    return f"{one.name} = {show(one.value)}{unit} ({show(one.low)} to {show(one.high)})"


def prediction_sentence(checked: CheckedPrediction) -> str:
    """Return a prediction, and the measurement of its size if there is one."""
    one = checked.prediction
    high = "no upper limit" if checked.high is None else amount(checked.high)
    text = (
        f"predicted for {counted(one.ranks, 'rank')}: {amount(one.throughput)} samples/s "
        f"({amount(one.low)} to {high}), {one.model}"
    )
    if checked.measured is None or checked.error is None:
        return f"{text}; not measured yet"
    inside = "inside" if checked.is_inside else "outside of"
    return (
        f"{text}; measured: {amount(checked.measured.value)}, {inside} the interval, error "
        f"{100 * checked.error:+.1f} %"
    )


def batch_sentences(found: BatchAdvice | None) -> list[str]:
    """Return the noise scale, and steps and samples to the same loss for each larger batch."""
    if found is None:
        return []
    runs = counted(found.runs, "run")
    if found.samples is None or found.low is None or found.high is None:
        return [
            f"Gradient noise scale: undetermined in most of {runs}, because the gradient is not "
            "above its noise. Nothing is said of steps to a loss with the larger batches. HINT: "
            "paceline scale --critical-batch measures them"
        ]
    return [
        f"Gradient noise scale: {amount(found.samples)} samples (95 %: {amount(found.low)} to "
        f"{amount(found.high)}; median of {runs}). Relative to a batch of {amount(found.base)}, "
        "to the same loss:",
        *(
            f"  {counted(one.ranks, 'rank')}{'' if one.is_measured else ' (predicted)'}, batch "
            f"{amount(one.batch)}: {_band(one.steps)} of the steps, {_band(one.samples)} times the "
            "samples"
            for one in found.larger
        ),
    ]


def _band(found: Band) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


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
