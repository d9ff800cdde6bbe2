"""Ranks whose losses are means over different amounts, and that count equally in the gradient."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...exchange import Exchange, Kind
from ...mistakes import MISTAKES, Finding, Nature
from ...relations import solve
from ...view import View
from .weights import is_near, is_plain_sum, loss_weight

Weights = NDArray[np.float64]  # by rank
LOOSE = 0.15  # relative difference of the sum of the ranks' weights from 1
PROPORTIONAL = 0.02  # of weights that are proportional to numbers of samples
RARE = 0.5  # of the steps: more often, batches differ on purpose
SAME = 1e-6  # relative difference of equal amounts
RESIDUAL = 1e-4  # of a combination of the ranks' gradients that is that of one process
WEIGHTED = "targets (as weighted by their classes)"


def uneven(view: View) -> Iterator[Finding]:
    """Find ranks with different amounts and equal weight."""
    uneven_steps = 0
    wrong: list[tuple[Exchange, str]] = []
    for one in view.exchanges:
        what, amounts = _amounts(one)
        known, has_parts = _weights_of_one_process(view, one)
        shares = np.array(amounts) / max(float(np.mean(amounts)), 1e-30)
        differ = all(amounts) and max(amounts) - min(amounts) > SAME * max(amounts)
        uneven_steps += differ
        if one.kind is not Kind.UNIFORM or not one.step.is_at_one_place:
            continue
        if known is None:
            if differ and _has_equal_weights(one, shares):
                wrong.append((one, _means_over(what, amounts, view.size)))
        elif np.abs(known - 1).max() > PROPORTIONAL:
            if differ and np.abs(known - shares).max() <= PROPORTIONAL:
                wrong.append((one, _means_over(what, amounts, view.size)))
            elif not has_parts:  # a script may weight parts by what they contain
                wrong.append((one, _weighted([float(x) for x in known / view.size])))
    if not wrong:
        return
    one, text = wrong[0]
    is_compared = _weights_of_one_process(view, one)[0] is not None
    is_usual = uneven_steps > RARE * len(view.exchanges) or _amounts(one)[0] != "samples"
    yield Finding(
        MISTAKES["uneven-batches-averaged"],
        one.step.lines,
        f"In step {one.step.index + 1}, {text}"
        + (f" So do {len(wrong) - 1} other steps." if len(wrong) > 1 else ""),
        step=one.step.index + 1,
        values={"steps": len(wrong)},
        nature=Nature.QUESTION if is_usual and not is_compared else None,
        remedy="divide the sum of each rank's loss by what all ranks have together (an all_reduce "
        "of the counts), and multiply it by the number of ranks; or drop the last batch",
    )


def _means_over(what: str, amounts: Sequence[float], size: int) -> str:
    whole, least = sum(amounts), min(amounts)
    return (
        f"the losses of the ranks are means over {_numbers(amounts)} {what}, and the gradient is "
        f"the plain mean of the ranks: each of {_number(least)} {what} counts "
        f"{whole / (least * size):.3g} times as much as in one batch of {_number(whole)}."
    )


def _weighted(weights: Sequence[float]) -> str:
    return (
        "the gradient is the plain mean of the ranks. In one process with the same samples, theirs "
        f"have the weights {_numbers(weights)}: the loss of a rank is a mean over something of "
        "which the ranks have different amounts (masked or weighted targets)."
    )


def _weights_of_one_process(view: View, one: Exchange) -> tuple[Weights | None, bool]:
    """Return the weight of each rank's gradient in that of one process, and whether it had parts.

    The weights are relative to those of a mean over the ranks; None if they are not known. A replay
    in parts weights by samples: equal weights there say nothing about other amounts.
    """
    found: Weights | None = None
    for replay in (view.replay, view.reference):
        theirs = replay.gradients(one.step)
        if theirs is None:
            continue
        if not replay.in_parts:
            found = np.ones(view.size)  # something else differs, if anything does
        local = [one.step.local(rank, one.last) for rank in range(view.size)]
        names = [name for name in local[0] if name in theirs]
        values, residual = solve(theirs, local, names) if names else (None, 1.0)
        is_known = residual <= RESIDUAL and is_near(one.multiple, 1.0)
        if values is None or not is_known or not is_near(float(values.sum()), 1.0, LOOSE):
            continue
        weights = values * view.size
        if not replay.in_parts or np.abs(weights - 1).max() > PROPORTIONAL:
            return weights, replay.in_parts
    return found, True


def _amounts(one: Exchange) -> tuple[str, Sequence[float]]:
    """Return what the losses are means over, in words, and how many each rank has."""
    weights = [sum(b.class_weight for b in each[-one.last :]) for each in one.step.backwards]
    if all(weights) and all(b.reduction == "mean" for each in one.step.backwards for b in each):
        return WEIGHTED, weights
    elements = [sum(b.elements for b in each[-one.last :]) for each in one.step.backwards]
    if len(set(one.step.samples)) == 1 and all(elements):
        return "targets", elements
    return "samples", one.step.samples


def _has_equal_weights(one: Exchange, shares: Weights) -> bool:
    """Return whether losses of ranks with different shares have equal weights."""
    weights = [loss_weight(backwards[-one.last :]) for backwards in one.step.backwards]
    known = np.array([value for value in weights if value is not None])
    is_sum = any(is_plain_sum(b) for each in one.step.backwards for b in each)
    if len(known) < len(weights) or is_sum:
        return False
    relative = known / known.mean()
    is_proportional = np.abs(relative - shares).max() <= PROPORTIONAL
    return bool(np.abs(relative - 1).max() <= PROPORTIONAL and not is_proportional)


def _numbers(values: Sequence[float]) -> str:
    shown = [_number(one) for one in values]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.4g}"
