"""Ranks whose losses are means over different amounts, and that count equally in the gradient."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...exchange import Exchange, Kind
from ...mistakes import MISTAKES, Finding, Nature
from ...relations import add, distance, scaled, solve
from ...view import View, unique
from .weights import LOOSE, is_near, is_plain_sum, loss_weight

PROPORTIONAL = 0.02  # of weights that are proportional to numbers of samples
RARE = 0.5  # of the steps: more often, batches differ on purpose
SAME = 1e-6  # relative difference of equal sums of class weights
RESIDUAL = 1e-4  # of a combination of the ranks' gradients that is that of one process
WEIGHTED = "targets (as weighted by their classes)"


def uneven(view: View) -> Iterator[Finding]:
    """Find ranks with different numbers of samples and equal weight."""
    sizes = [(one, *_sizes(one)) for one in view.exchanges]
    differing = [
        (one, size)
        for one, _, size in sizes
        if all(size) and not is_near(min(size), max(size), SAME) and one.step.is_at_one_place
    ]
    wrong = [one for one, size in differing if _has_equal_weights(view, one, size)]
    if not wrong:
        yield from _other_weights(view)
        return
    first = wrong[0]
    what, samples = _sizes(first)
    varies = len({tuple(size) for _, _, size in sizes}) > 2 and len(differing) > RARE * len(sizes)
    whole = sum(samples)
    least = min(samples)
    weight = whole / (least * view.size)
    yield Finding(
        MISTAKES["uneven-batches-averaged"],
        unique(first.step.lines),
        f"In step {first.step.index + 1}, the losses of the ranks are means over "
        f"{_numbers(samples)} {what}, and the gradient is the plain mean of the ranks: each of "
        f"{_number(least)} {what} counts {weight:.3g} times as much as in one batch of "
        f"{_number(whole)}." + (f" So do {len(wrong) - 1} other steps." if len(wrong) > 1 else ""),
        step=first.step.index + 1,
        values={"samples": whole, "least": least, "weight": weight, "steps": len(wrong)},
        nature=Nature.QUESTION if varies or what != "samples" else None,
    )


def _other_weights(view: View) -> Iterator[Finding]:
    """Find a mean of the ranks' gradients where one process weights them otherwise."""
    replay = view.runs.replay
    if replay is None or replay.parts > 1:
        return  # in parts, a script may weight each part by what it contains
    for one in view.exchanges:
        theirs = view.replay.gradients(one.step)
        if theirs is None or one.kind is not Kind.UNIFORM or not is_near(one.multiple, 1.0):
            continue
        local = [one.step.local(rank, one.last) for rank in range(view.size)]
        names = [name for name in local[0] if name in theirs]
        values, residual = solve(theirs, local, names) if names else (None, 1.0)
        if values is None or residual > RESIDUAL or not is_near(float(values.sum()), 1.0, LOOSE):
            continue
        if np.abs(values * view.size - 1).max() <= PROPORTIONAL:
            continue
        yield Finding(
            MISTAKES["uneven-batches-averaged"],
            unique(one.step.lines),
            f"In step {one.step.index + 1}, the gradient is the plain mean of the ranks. In one "
            f"process with the same samples, theirs have the weights {_numbers(list(values))}: the "
            "loss of a rank is a mean over something of which the ranks have different amounts "
            "(masked or weighted targets).",
            step=one.step.index + 1,
            values={f"weight_{rank}": float(value) for rank, value in enumerate(values)},
            nature=Nature.QUESTION,
            remedy="divide the sum of each rank's loss by what all ranks have together (an "
            "all_reduce of the counts), and multiply it by the number of ranks",
        )
        return


def _sizes(one: Exchange) -> tuple[str, Sequence[float]]:
    """Return what the losses are means over, in words, and how many each rank has."""
    weights = [sum(b.class_weight for b in each[-one.last :]) for each in one.step.backwards]
    if all(weights) and all(b.reduction == "mean" for each in one.step.backwards for b in each):
        return WEIGHTED, weights
    elements = [sum(b.elements for b in each[-one.last :]) for each in one.step.backwards]
    if len(set(one.step.samples)) == 1 and all(elements):
        return "targets", elements
    return "samples", one.step.samples


def _has_equal_weights(view: View, one: Exchange, sizes: Sequence[float]) -> bool:
    """Return whether ranks count equally although one process would count samples equally."""
    if one.kind is not Kind.UNIFORM:
        return False
    step = one.step
    shares = np.array(sizes) / np.mean(sizes)
    weights = [loss_weight(backwards[-one.last :]) for backwards in step.backwards]
    backwards = [b for each in step.backwards for b in each]
    theirs = view.reference.gradients(step)
    if theirs is not None:
        local = [step.local(rank, one.last) for rank in range(step.size)]
        mean = scaled(add(local), 1 / step.size)
        weighted = add([scaled(v, s / step.size) for v, s in zip(local, shares, strict=True)])
        names = [name for name in weighted if name in theirs]
        off = max((distance(mean[name], theirs[name]) for name in names), default=0.0)
        near = max((distance(weighted[name], theirs[name]) for name in names), default=1.0)
        return near < 0.1 * off
    if any(value is None for value in weights) or any(is_plain_sum(b) for b in backwards):
        return False
    relative = np.array(weights, dtype=float) / np.mean(np.array(weights, dtype=float))
    proportional = np.abs(relative - shares).max() <= PROPORTIONAL
    equal = np.abs(relative - 1).max() <= PROPORTIONAL
    return bool(equal and not proportional)


def _numbers(values: Sequence[float]) -> str:
    shown = [_number(one) for one in values]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.4g}"
