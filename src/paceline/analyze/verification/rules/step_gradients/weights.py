"""How much weight the gradient of a step has: sums, means, and divisions of the loss."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .....record.training.facts.ranks import RankFacts
from .....record.training.facts.steps import BackwardFacts
from ...exchange import Exchange, Kind
from ...losses import joint_factor
from ...mistakes import MISTAKES, Finding, Nature
from ...steps import trained
from ...view import View

EXACT = 2e-3  # relative difference of factors that are equal
MEASURED = 0.02  # the same of gradients, with their rounding
SUMS = ("sum", "none")  # reductions whose value is known as the sum over the elements
SAME_SCALE = 1e-5  # relative difference of factors that a script multiplies losses by


def is_near(value: float, expected: float, limit: float = EXACT) -> bool:
    """Return whether a factor is equal to another."""
    return abs(value - expected) <= limit * abs(expected)


def loss_weight(backwards: list[BackwardFacts]) -> float | None:
    """Return the root of some backwards as a multiple of their losses, added; None if unknown.

    A loss that is a sum over samples counts as a mean: it is multiplied by their number.
    """
    total = 0.0
    for one in backwards:
        if one.loss is None or one.loss == 0 or not np.isfinite(one.loss):
            return None
        share = one.root / (one.loss * one.scale)
        if one.reduction in SUMS and not is_plain_sum(one):
            if not one.elements:
                return None
            share *= one.elements
        total += share
    return total


def exchanged_weight(view: View) -> Iterator[Finding]:
    """Find gradients that are N times as large, or as small, as those of one process."""
    n = view.size
    for one in view.exchanges:
        if one.kind is not Kind.UNIFORM or view.size < 2:
            continue
        ratio, rates = _ratio(view, one), rate_ratio(view)
        if ratio is None:
            continue
        if is_near(ratio, n, MEASURED) and not is_near(rates, 1 / n):
            yield _finding(view, one, is_large=True)
        if is_near(ratio, 1 / n, MEASURED):
            found = _finding(view, one, is_large=False)
            if found.mistake.id == "loss-summed" and is_near(rates, n):
                text = (
                    f"{found.text} The learning rate is {n} times that of one rank. Does it depend "
                    "on the number of ranks only? Then it makes up for this; if it depends on the "
                    "global batch size, it does not."
                )
                found = replace(found, text=text, nature=Nature.QUESTION)
            yield found


def accumulation(view: View) -> Iterator[Finding]:
    """Find losses of accumulated batches that are divided by another number than theirs."""
    for one in view.exchanges:
        step, count = one.step, view.accumulated.get(one.step.optimizer, 1)
        backwards = step.steps[0].backwards  # also those whose gradients were set to zero
        if count < 2 or len(backwards) != count or not _is_accumulation(view.ranks[0], backwards):
            continue
        weight = _single_weight(view, one)
        if weight is None or any(b.reduction in SUMS for b in backwards):
            continue
        used = min(one.last, len(step.backwards[0]))
        multiple = one.multiple if one.kind is Kind.UNIFORM else 1.0
        if is_near(multiple, 1 / count):  # divided after the backward
            weight *= multiple
        lines = [backwards[-1].line, step.steps[0].line]
        if is_near(weight, count):
            text = (
                f"Each step adds the gradients of {count} batches, and the loss of each is not "
                f"divided by {count}: the gradient is {count} times that of their mean."
            )
        elif is_near(weight, 1 / count):
            lost = used < count
            text = (
                f"Each step runs {count} backwards, and uses the gradient of the last "
                f"{used} only: it is {count} times too small."
                if lost
                else f"The losses of the {count} batches of a step are divided by {count} twice: "
                f"the gradient is {count} times too small."
            )
        else:
            continue
        yield Finding(
            MISTAKES["accumulation-divided-wrongly"],
            lines,
            text,
            step=step.index + 1,
            values={"batches": count, "weight": weight},
            remedy=f"divide the loss by {count}, once, and call zero_grad once per step",
        )


def rate_ratio(view: View) -> float:
    """Return the first learning rate on N ranks, relative to that on one; 1 if unknown."""
    single = view.single
    if single is None or not single.optimizers or not view.ranks[0].optimizers:
        return 1.0
    ours, theirs = view.ranks[0].optimizers[0], single.optimizers[0]
    if not ours.initial_rates or not theirs.initial_rates or not theirs.initial_rates[0]:
        return 1.0
    return ours.initial_rates[0] / theirs.initial_rates[0]


def is_compensated(view: View) -> bool:
    """Return whether the learning rate makes up for a gradient that is a multiple of one process's.

    As where losses are summed over the samples of a rank, averaged over N ranks, and the rate is
    multiplied by N.
    """
    one = view.difference
    step = next(
        (x for x in view.replayed if one and (x.optimizer, x.index) == (one.optimizer, one.index)),
        None,
    )
    multiple = view.reference.multiple(step, step.unclipped(0)) if step is not None else None
    rates = rate_ratio(view)
    return multiple is not None and rates != 1.0 and is_near(multiple * rates, 1.0, MEASURED)


def _ratio(view: View, one: Exchange) -> float | None:
    """Return the gradient as a multiple of that of one process; None if it is none.

    Without a comparison, it follows from the exchange and from what the backwards start from.
    """
    measured = view.reference.multiple(one.step, one.step.unclipped(0))
    if measured is not None and view.runs.joint is not None:
        by_step = {(x.step.optimizer, x.step.index): x for x in view.exchanges}
        return measured * joint_factor(view.runs.joint, view.replayed, by_step)
    if measured is not None or view.reference.gradients(one.step) is not None:
        return measured
    ours, theirs = _weight(one), _replayed_weight(view, one)
    backwards = one.step.backwards[0]
    if all(b.reduction in SUMS and is_plain_sum(b) for b in backwards):
        # One process would sum over the samples of all ranks, too. A scale by hand is in both.
        return one.factor * _scale_by_hand(one)
    if ours is None:
        return None
    if theirs is not None and theirs > 0:
        return one.multiple * ours / theirs
    count = max(len(backwards), 1)
    expected = min((1.0, float(count)), key=lambda one: abs(one - ours))
    known = ours if is_near(ours, 1 / view.size) or is_near(ours, view.size) else expected
    return one.multiple * known / expected


def _weight(one: Exchange) -> float | None:
    """Return the mean of the ranks' loss weights."""
    found = [loss_weight(backwards[-one.last :]) for backwards in one.step.backwards]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if len(known) == len(found) else None


def _scale_by_hand(one: Exchange) -> float:
    """Return the number by which all ranks multiply their losses; 1 if other terms are added."""
    found = [loss_weight(backwards[-one.last :]) for backwards in one.step.backwards]
    known = [value for value in found if value is not None]
    is_scale = len(known) == len(found) and max(known) - min(known) <= SAME_SCALE * abs(known[0])
    return known[0] if is_scale else 1.0


def _replayed_weight(view: View, one: Exchange) -> float | None:
    step, parts = view.reference.step(one.step), view.reference.parts
    if step is None or not step.backwards:
        return None
    if parts > 1:  # of each batch: their gradients are added, and only the last one has them
        return loss_weight(step.backwards[-one.last * parts :])
    used = [one for one in step.backwards if one.gradients.keys() & step.gradients.keys()]
    # One process may accumulate more batches, until it has the same global batch.
    is_alike = len(step.backwards) == len(one.step.steps[0].backwards)
    return loss_weight((used or step.backwards)[-one.last if is_alike else 0 :])


def _single_weight(view: View, one: Exchange) -> float | None:
    """Return the loss weight on one rank, where no number of ranks is in it."""
    theirs = _replayed_weight(view, one)
    return theirs if theirs is not None else _weight(one)


def _is_accumulation(facts: RankFacts, backwards: list[BackwardFacts]) -> bool:
    """Return whether each backward has batches of its own, of one loader."""
    fetched = [trained(facts, one) for one in backwards]
    flat = [at for batches in fetched for at in batches]
    loaders = {facts.batches[at].loader for at in flat}
    return all(fetched) and len(set(flat)) == len(flat) and len(loaders) == 1


def _finding(view: View, one: Exchange, is_large: bool) -> Finding:
    """Return the finding of a gradient that is N times that of one process, or 1/N of it."""
    n, step, kind = view.size, one.step, "gradients-divided-twice"
    lines, remedy = step.lines, f"leave out the division by {n}: the exchange averages already"
    of_sum = any(b.reduction in SUMS and is_plain_sum(b) for b in step.backwards[0])
    is_mean = is_near(one.multiple, 1.0)
    if is_large and is_near(one.multiple, n):
        kind, text = "gradients-summed", "it is the sum of the gradients of the ranks"
        lines = [*view.exchange_hook_lines(step), *view.gradient_lines(), *view.change_lines(step)]
        lines += [*_wrapper_lines(view, one), *step.lines]
        remedy = f"divide the gradients by {n} (the number of ranks) after the all_reduce"
    elif is_large:
        kind, remedy = "gradients-summed", "leave out the multiplication of the loss"
        text = f"the loss is multiplied by {n}, and the gradients are averaged"
    elif (of_sum and is_near(one.multiple * _scale_by_hand(one), 1.0)) or (
        is_mean and _is_like_alone(view, one)
    ):
        kind, remedy = "loss-summed", ""
        text = (
            "the loss is a sum over the samples of a rank, and the gradients are averaged. The "
            "effective learning rate depends on the number of ranks"
        )
    elif is_mean:
        hooks = view.hook_lines(step)
        what = "a hook or the loss divides" if hooks else "the loss is divided"
        text = f"{what} by {n} on each rank, and the gradients are averaged"
        text += ", or the loss is a sum over samples" * (_weight(one) is None)
        lines = [*hooks, *step.lines]
    else:
        text = "the gradients are averaged, and divided once more"
        lines = [*view.lines_after_exchange(step), *view.exchange_hook_lines(step)]
        lines += reversed(step.lines)
    return Finding(
        MISTAKES[kind],
        lines,
        f"In step {step.index + 1}, the gradient is {n if is_large else f'1/{n}'} times that of "
        f"one process with the same samples: {text}.",
        step=step.index + 1,
        values={"factor": n if is_large else 1 / n, "ranks": n},
        remedy=remedy,
    )


def _is_like_alone(view: View, one: Exchange) -> bool:
    """Return whether ranks and one process start backwards from values of about the same size.

    So do sums over samples that a script computes by hand; a loss that is divided by the number of
    ranks is larger on one. False if the loss function is known.
    """
    alone = view.runs.alone
    if _weight(one) is not None or one.step.index != 0 or alone is None or not alone.steps:
        return False
    backwards = alone.steps[0].backwards
    samples = [alone.batches[at].samples for b in backwards for at in trained(alone, b)]
    if len(set(one.step.samples)) > 1 or sum(samples) != one.step.samples[0]:
        return False
    theirs = sum(b.root for b in backwards)
    ours = float(np.mean([sum(b.root for b in each) for each in one.step.backwards]))
    return theirs > 0 and ours / theirs > view.size**-0.5


def _wrapper_lines(view: View, one: Exchange) -> list[str]:
    model = view.model(one.step.backwards[0][-1].model)
    return [model.line] if model is not None and model.wrapper else []


def is_plain_sum(one: BackwardFacts) -> bool:
    """Return whether a backward starts from a sum over samples, or from an unknown loss."""
    loss = (one.loss or 0.0) * one.scale
    is_divided = abs(one.root) < (1 - EXACT) * abs(loss)  # other terms may be added to the sum
    return one.reduction not in ("mean", *SUMS) or (one.reduction in SUMS and not is_divided)
