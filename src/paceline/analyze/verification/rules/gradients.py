"""Gradients of N ranks beside those of one process: what a difference is called, and its line."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ....observe.facts.ranks import RankFacts
from ....observe.facts.steps import BackwardFacts, ClipFacts
from ..comparison import COMBINED, Difference, What, joint_factor
from ..exchange import Exchange, Kind
from ..joined_runs import JoinedRuns, listed
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..relations import distance, solve, vectors
from ..replayed_steps import NOISE_FACTOR
from ..steps import JointStep, find_step, trained
from .replicas import MISTAKES as MISTAKES_OF_REPLICAS

Weights = NDArray[np.float64]  # by rank
EQUAL_FACTORS = 2e-3  # relative difference of factors that are equal
MEASURED = 0.02  # the same of gradients, with their rounding
SUM_REDUCTIONS = ("sum", "none")  # reductions whose value is known as the sum over the elements
SAME_SCALE = 1e-5  # relative difference of factors that a script multiplies losses by
MAX_WEIGHT_ERROR = 0.15  # relative difference of the sum of the ranks' weights from 1
PROPORTIONAL = 0.02  # of weights that are proportional to numbers of samples
OWN_GRADIENT = 1e-3  # relative difference of gradients that are those of a rank, or were clipped
EQUAL_GRADIENTS = 1e-5  # relative difference of equal gradients
_IN_TURN = "one process that trains the batches of the ranks one after the other"

MISTAKES = by_id(
    Mistake(
        "gradients-summed",
        "Gradients are summed over the ranks, and not averaged",
        "the gradient beside that of one process, else beside the mean of the ranks' gradients",
        "divide the sum by the number of ranks",
        explains=ids("gradients-differ learning-rate-scaled-twice"),
        is_gradient=True,
    ),
    Mistake(
        "gradients-divided-twice",
        "Gradients are divided by the number of ranks twice",
        "the gradient beside that of one process, else beside the mean of the ranks' gradients",
        "leave out the division: the exchange averages already",
        explains=("gradients-differ",),
        is_gradient=True,
    ),
    Mistake(
        "clipped-before-exchange",
        "Gradients are clipped before they are exchanged",
        "the gradient of each rank before and after a call that clips, and that of one process",
        "clip after the exchange: with DistributedDataParallel, after the last backward",
        explains=ids("gradients-differ replicas-diverge"),
        is_gradient=True,
    ),
    Mistake(
        "accumulation-divided-wrongly",
        "The loss is not divided by the number of accumulated batches",
        "the gradient of a step beside the mean of those of its batches",
        "divide the loss by the number of batches of a step, once",
        explains=("gradients-differ",),
    ),
    Mistake(
        "uneven-batches-averaged",
        "Batches of different sizes have equal weight in the gradient",
        "the weight of each rank's gradient in that of one process, and its samples",
        "weight each rank's loss by its number of samples, or drop the last batch",
        explains=("gradients-differ",),
        is_gradient=True,
    ),
    Mistake(
        "loss-summed",
        "The loss is a sum over samples, whose gradient is averaged over ranks",
        "the gradient beside that of one process, else beside the sum of the ranks' gradients",
        "use the mean over samples, or scale the learning rate with the global batch size",
        explains=ids("gradients-differ uneven-batches-averaged"),
        is_gradient=True,
    ),
    Mistake(
        "batch-norm-of-one-rank",
        "Batch normalization uses the batch of one rank",
        "gradients beside those of one process that trains the ranks' batches in turn",
        "use SyncBatchNorm if the statistics of the global batch are wanted",
        Nature.QUESTION,
        is_late=True,
    ),
    Mistake(
        "gradients-differ",
        "The gradient differs from that of one process",
        "losses, gradients, clipped gradients, updates and buffers beside those of one process",
        "compare the lines between the loss and the optimizer's step on one rank and on N",
        is_gradient=True,
    ),
)


def is_near(value: float, expected: float, limit: float = EQUAL_FACTORS) -> bool:
    """Return whether a factor is equal to another."""
    return abs(value - expected) <= limit * abs(expected)


def loss_weight(backwards: list[BackwardFacts]) -> float | None:
    """Return the sum over backwards of the value that each started from over its loss.

    None if a loss is unknown. A loss that is a sum over samples counts as a mean: it is multiplied
    by their number.
    """
    total = 0.0
    for one in backwards:
        if one.loss is None or one.loss == 0 or not np.isfinite(one.loss):
            return None
        share = one.root / (one.loss * one.scale)
        if one.reduction in SUM_REDUCTIONS and not is_plain_sum(one):
            if not one.elements:
                return None
            share *= one.elements
        total += share
    return total


def exchanged_weight(joined: JoinedRuns) -> Iterator[Finding]:
    """Find gradients that are N times as large, or as small, as those of one process."""
    n = joined.size
    if n < 2 or joined.comparison.reason:
        return
    by_loss = _ratio_by_loss(joined) if not joined.replayed else None
    for one in joined.exchanges:
        if one.kind is not Kind.UNIFORM:
            continue
        named = _loss_ratio(joined, one) if joined.difference is not None else by_loss
        ratio = _measured_ratio(joined, one) or named or 1.0
        if is_near(ratio, n, MEASURED) and not is_near(rate_ratio(joined), 1 / n):
            yield _finding(joined, one, is_large=True)
        if is_near(ratio, 1 / n, MEASURED):
            yield _finding(joined, one, is_large=False)


def _measured_ratio(joined: JoinedRuns, one: Exchange) -> float | None:
    """Return the gradient as a multiple of that of one process; None if it is none."""
    measured = joined.reference.multiple(one.step, one.step.unclipped(0))
    if measured is None or joined.runs.joint is None:
        return measured
    return measured * joint_factor(joined.runs.joint, joined.replayed, joined.exchange_by_step)


def _ratio_by_loss(joined: JoinedRuns) -> float | None:
    """Return the gradients as a multiple of those of one process, without a comparison.

    It follows from the exchange and from what the backwards start from. None if it is unknown, or
    another one in some steps.
    """
    steps = [one for one in joined.exchanges if one.kind is Kind.UNIFORM]
    found = [ratio for one in steps if (ratio := _loss_ratio(joined, one)) is not None]
    is_known = bool(found) and max(found) - min(found) <= MEASURED * max(found)
    return found[0] if is_known and len(found) == len(steps) else None


def accumulation(joined: JoinedRuns) -> Iterator[Finding]:
    """Find losses of accumulated batches that are divided by another number than theirs."""
    for one in joined.exchanges:
        step, count = one.step, joined.accumulated.get(one.step.optimizer, 1)
        backwards = step.steps[0].backwards  # also those whose gradients were set to zero
        if count < 2 or len(backwards) != count or not _is_accumulation(joined.ranks[0], backwards):
            continue
        of_one = _replayed_weight(joined, one)  # no number of ranks is in it
        weight = of_one if of_one is not None else _weight(one)
        if weight is None or any(b.reduction in SUM_REDUCTIONS for b in backwards):
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


def rate_ratio(joined: JoinedRuns) -> float:
    """Return the first learning rate on N ranks, relative to that on one; 1 if unknown."""
    single = joined.runs.single
    if single is None or not single.optimizers or not joined.ranks[0].optimizers:
        return 1.0
    of_ranks, alone = joined.ranks[0].optimizers[0], single.optimizers[0]
    if not of_ranks.initial_rates or not alone.initial_rates or not alone.initial_rates[0]:
        return 1.0
    return of_ranks.initial_rates[0] / alone.initial_rates[0]


def is_compensated(joined: JoinedRuns) -> bool:
    """Return whether the learning rate makes up for a gradient that is a multiple of one process's.

    As where losses are summed over the samples of a rank, averaged over N ranks, and the rate is
    multiplied by N.
    """
    one = joined.difference
    step = find_step(joined.replayed, one.key) if one is not None else None
    multiple = joined.reference.multiple(step, step.unclipped(0)) if step is not None else None
    rates = rate_ratio(joined)
    return multiple is not None and rates != 1.0 and is_near(multiple * rates, 1.0, MEASURED)


def _loss_ratio(joined: JoinedRuns, one: Exchange) -> float | None:
    """Return the same for one step; None if the loss function is not known."""
    weight, replayed = _weight(one), _replayed_weight(joined, one)
    backwards = one.step.backwards[0]
    if all(b.reduction in SUM_REDUCTIONS and is_plain_sum(b) for b in backwards):
        # One process would sum over the samples of all ranks, too. A scale by hand is in both.
        return one.factor * _scale_by_hand(one)
    if weight is None:
        return None
    if replayed is not None and replayed > 0:
        return one.multiple * weight / replayed
    count = max(len(backwards), 1)
    expected = min((1.0, float(count)), key=lambda one: abs(one - weight))
    known = weight if is_near(weight, 1 / joined.size) or is_near(weight, joined.size) else expected
    return one.multiple * known / expected


def _weights(one: Exchange) -> list[float]:
    """Return the loss weight of each rank; [] if that of one is not known."""
    weights = [loss_weight(backwards[-one.last :]) for backwards in one.step.backwards]
    known = [weight for weight in weights if weight is not None]
    return known if len(known) == len(weights) else []


def _weight(one: Exchange) -> float | None:
    """Return the mean of the ranks' loss weights."""
    weights = _weights(one)
    return float(np.mean(weights)) if weights else None


def _scale_by_hand(one: Exchange) -> float:
    """Return the number by which all ranks multiply their losses; 1 if other terms are added."""
    weights = _weights(one)
    is_scale = weights and max(weights) - min(weights) <= SAME_SCALE * abs(weights[0])
    return weights[0] if is_scale else 1.0


def _replayed_weight(joined: JoinedRuns, one: Exchange) -> float | None:
    step, parts = joined.reference.step(one.step), joined.reference.parts
    if step is None or not step.backwards:
        return None
    if parts > 1:  # of each batch: their gradients are added, and only the last one has them
        return loss_weight(step.backwards[-one.last * parts :])
    used = [one for one in step.backwards if one.gradients.keys() & step.gradients.keys()]
    # One process may accumulate more batches, until it has the same global batch.
    is_alike = len(step.backwards) == len(one.step.steps[0].backwards)
    return loss_weight((used or step.backwards)[-one.last if is_alike else 0 :])


def _is_accumulation(facts: RankFacts, backwards: list[BackwardFacts]) -> bool:
    """Return whether each backward has batches of its own, of one loader."""
    fetched = [trained(facts, one) for one in backwards]
    flat = [at for batches in fetched for at in batches]
    loaders = {facts.batches[at].loader for at in flat}
    return all(fetched) and len(set(flat)) == len(flat) and len(loaders) == 1


def _finding(joined: JoinedRuns, one: Exchange, is_large: bool) -> Finding:
    """Return the finding of a gradient that is N times that of one process, or 1/N of it."""
    n, step, kind = joined.size, one.step, "gradients-divided-twice"
    lines, remedy = step.lines, f"leave out the division by {n}: the exchange averages already"
    of_sum = any(b.reduction in SUM_REDUCTIONS and is_plain_sum(b) for b in step.backwards[0])
    is_mean = is_near(one.multiple, 1.0)
    if is_large and is_near(one.multiple, n):
        kind, text = "gradients-summed", "it is the sum of the gradients of the ranks"
        lines = [
            *joined.exchange_hook_lines(step),
            *joined.gradient_lines(),
            *joined.change_lines(step),
        ]
        lines += [*_wrapper_lines(joined, one), *step.lines]
        remedy = f"divide the gradients by {n} (the number of ranks) after the all_reduce"
    elif is_large:
        kind, remedy = "gradients-summed", "leave out the multiplication of the loss"
        text = f"the loss is multiplied by {n}, and the gradients are averaged"
    elif (of_sum and is_near(one.multiple * _scale_by_hand(one), 1.0)) or (
        is_mean and _is_like_alone(joined, one)
    ):
        kind, remedy = "loss-summed", ""
        text = (
            "the loss is a sum over the samples of a rank, and the gradients are averaged. The "
            "effective learning rate depends on the number of ranks"
        )
    elif is_mean:
        hooks = joined.hook_lines(step)
        what = "a hook or the loss divides" if hooks else "the loss is divided"
        text = f"{what} by {n} on each rank, and the gradients are averaged"
        text += ", or the loss is a sum over samples" * (_weight(one) is None)
        lines = [*hooks, *step.lines]
    else:
        text = "the gradients are averaged, and divided once more"
        lines = [*joined.lines_after_exchange(step), *joined.exchange_hook_lines(step)]
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


def _is_like_alone(joined: JoinedRuns, one: Exchange) -> bool:
    """Return whether ranks and one process start backwards from values of about the same size.

    So do sums over samples that a script computes by hand; a loss that is divided by the number of
    ranks is larger on one. False if the loss function is known.
    """
    alone = joined.runs.alone
    if _weight(one) is not None or one.step.index != 0 or alone is None or not alone.steps:
        return False
    backwards = alone.steps[0].backwards
    samples = [alone.batches[at].samples for b in backwards for at in trained(alone, b)]
    if len(set(one.step.samples)) > 1 or sum(samples) != one.step.samples[0]:
        return False
    theirs = sum(b.root for b in backwards)
    ours = float(np.mean([sum(b.root for b in each) for each in one.step.backwards]))
    return theirs > 0 and ours / theirs > joined.size**-0.5


def _wrapper_lines(joined: JoinedRuns, one: Exchange) -> list[str]:
    model = joined.model(one.step.backwards[0][-1].model)
    return [model.line] if model is not None and model.wrapper else []


def is_plain_sum(one: BackwardFacts) -> bool:
    """Return whether a backward starts from a sum over samples, or from an unknown loss."""
    loss = (one.loss or 0.0) * one.scale
    is_divided = abs(one.root) < (1 - EQUAL_FACTORS) * abs(
        loss
    )  # other terms may be added to the sum
    return one.reduction not in ("mean", *SUM_REDUCTIONS) or (
        one.reduction in SUM_REDUCTIONS and not is_divided
    )


def uneven(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks whose gradients have other weights in one process: they have other amounts."""
    wrong: list[tuple[Exchange, str]] = []
    for one in joined.exchanges:
        known, has_parts = _weights_of_one_process(joined, one)
        if one.kind is not Kind.UNIFORM or not one.step.is_at_one_place or known is None:
            continue
        if np.abs(known - 1).max() <= PROPORTIONAL:
            continue
        what, amounts = _amounts(one)
        shares = np.array(amounts) / max(float(np.mean(amounts)), 1e-30)
        if np.abs(known - shares).max() <= PROPORTIONAL:
            wrong.append((one, _means_over(what, amounts, joined.size)))
        elif not has_parts:  # a script may weight parts by what they contain
            wrong.append((one, _weighted([float(x) for x in known / joined.size])))
    if not wrong:
        return
    one, text = wrong[0]
    yield Finding(
        MISTAKES["uneven-batches-averaged"],
        one.step.lines,
        f"In step {one.step.index + 1}, {text}"
        + (f" So do {len(wrong) - 1} other steps." if len(wrong) > 1 else ""),
        step=one.step.index + 1,
        values={"steps": len(wrong)},
        remedy="divide the sum of each rank's loss by what all ranks have together (an all_reduce "
        "of the counts), and multiply it by the number of ranks; or drop the last batch",
    )


def _means_over(what: str, amounts: Sequence[float], size: int) -> str:
    whole, least = sum(amounts), min(amounts)
    return (
        f"the losses of the ranks are means over {_numbers(*amounts)} {what}, and the gradient is "
        f"the plain mean of the ranks: each of {_numbers(least)} {what} counts "
        f"{whole / (least * size):.3g} times as much as in one batch of {_numbers(whole)}."
    )


def _weighted(weights: Sequence[float]) -> str:
    return (
        "the gradient is the plain mean of the ranks. In one process with the same samples, theirs "
        f"have the weights {_numbers(*weights)}: the loss of a rank is a mean over something of "
        "which the ranks have different amounts (masked or weighted targets)."
    )


def _weights_of_one_process(joined: JoinedRuns, one: Exchange) -> tuple[Weights | None, bool]:
    """Return the weight of each rank's gradient in that of one process, and whether it had parts.

    The weights are relative to those of a mean over the ranks; None if they are not known. A replay
    in parts weights by samples: equal weights there say nothing about other amounts.
    """
    found: Weights | None = None
    for replay in (joined.replay, joined.reference):
        theirs = replay.gradients(one.step)
        if theirs is None:
            continue
        if not replay.in_parts:
            found = np.ones(joined.size)  # something else differs, if anything does
        local = [one.step.local(rank, one.last) for rank in range(joined.size)]
        names = [name for name in local[0] if name in theirs]
        values, residual = solve(theirs, local, names) if names else (None, 1.0)
        is_known = residual <= COMBINED and is_near(one.multiple, 1.0)
        if (
            values is None
            or not is_known
            or not is_near(float(values.sum()), 1.0, MAX_WEIGHT_ERROR)
        ):
            continue
        weights = values * joined.size
        if not replay.in_parts or np.abs(weights - 1).max() > PROPORTIONAL:
            return weights, replay.in_parts
    return found, True


def _amounts(one: Exchange) -> tuple[str, Sequence[float]]:
    """Return what the losses are means over, in words, and how many each rank has."""
    weights = [sum(b.class_weight for b in each[-one.last :]) for each in one.step.backwards]
    if all(weights) and all(b.reduction == "mean" for each in one.step.backwards for b in each):
        return "targets (as weighted by their classes)", weights
    elements = [sum(b.elements for b in each[-one.last :]) for each in one.step.backwards]
    if len(set(one.step.samples)) == 1 and all(elements):
        return "targets", elements
    return "samples", one.step.samples


def _numbers(*values: float) -> str:
    shown = [str(int(one)) if one == int(one) else f"{one:.4g}" for one in values]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def clipped_before_exchange(joined: JoinedRuns) -> Iterator[Finding]:
    """Find gradients that each rank clips by the norm of its own gradient."""
    for one in joined.exchanges:
        step = one.step
        clips = _own_clips(step)
        if not clips and one.kind is Kind.OWN:
            clips = [facts.clips[0] for facts in step.steps if facts.clips]
        if not clips or not one.are_equal(EQUAL_GRADIENTS):
            continue
        clip, norms = clips[0], [one.norm for one in clips if one.norm is not None]
        known = ""
        if len(norms) == step.size:
            known = f" The norms before clipping are {min(norms):.4g} to {max(norms):.4g}."
        yield Finding(
            MISTAKES["clipped-before-exchange"],
            [clip.line, *joined.gradient_lines(), step.steps[0].line],
            f"In step {step.index + 1}, each rank clips its own gradient at {clip.limit:g}, and "
            f"the ranks exchange what is left.{known}",
            step=step.index + 1,
            values={"limit": clip.limit, **{f"norm_{r}": v for r, v in enumerate(norms)}},
        )


def _own_clips(step: JointStep) -> list[ClipFacts]:
    """Return the first call on each rank that clips, where the gradients of the ranks differ."""
    for clips in zip(*(facts.clips for facts in step.steps), strict=False):
        names = set.intersection(*(set(clip.gradients) for clip in clips)) - step.sharded.keys()
        pairs = list(zip(step.ranks, clips, strict=True))
        before = [vectors(facts, clip.gradients) for facts, clip in pairs]
        after = [vectors(facts, clip.clipped) for facts, clip in pairs]
        clipped = any(
            distance(one[name], two[name]) > OWN_GRADIENT
            for one, two in zip(before, after, strict=True)
            for name in names & two.keys()
        )
        if clipped and any(
            distance(before[0][n], one[n]) > OWN_GRADIENT for one in before for n in names
        ):
            return list(clips)
    return []


def differs(joined: JoinedRuns) -> Iterator[Finding]:
    """Find the first difference from one process."""
    one = joined.difference
    if one is not None:
        more = f" Nor is it the gradient of {_IN_TURN}." if joined.runs.cut is not None else ""
        nature = Nature.QUESTION if is_compensated(joined) else Nature.MEASURED
        yield _of_difference(one, _lines(joined, one), more, nature)


def part_loss(joined: JoinedRuns) -> Iterator[Finding]:
    """Tell that the loss of a rank depends on its part of the batch, as an experiment confirms."""
    one = joined.comparison.whole
    if one is None or "part-loss" not in joined.comparison.meant:
        return
    more = (
        f" O{_IN_TURN[1:]} computes the same gradient as the ranks: what a "
        "rank computes depends on which samples are in its part of the batch."
    )
    remedy = (
        "gather what the loss compares from all ranks; if the loss is meant to be that of each "
        "part: --accept part-loss"
    )
    yield _of_difference(one, one.lines, more, Nature.MEANT, "part-loss", remedy)


def _lines(joined: JoinedRuns, one: Difference) -> list[str]:
    """Return the lines to look at: those that clip, hooks, and others that change gradients."""
    step = find_step(joined.steps, one.key)
    if step is None or one.what is What.BUFFER:
        return one.lines
    clips = [clip.line for clip in step.steps[0].clips if one.what is What.USED]
    lines = [*clips, *joined.hook_lines(step)]
    exchange = joined.exchange_by_step.get(step.key)
    if exchange is not None and not exchange.is_mean:
        before = joined.lines_before_exchange(step)
        lines = [*before, *lines, *joined.lines_after_exchange(step)]
    return [*lines, *one.lines]


def _of_difference(
    one: Difference, lines: list[str], more: str, nature: Nature, meant: str = "", remedy: str = ""
) -> Finding:
    text = one.sentence
    if len(one.names) > 1:
        text += f"; so do those of {len(one.names) - 1} other{'s' * (len(one.names) > 2)}"
    if (losses := one.losses) is not None:
        is_equal = losses.size <= NOISE_FACTOR * losses.rounding
        of_both = f"{losses.ranks:.6g} on the ranks and {losses.one:.6g} in {one.against}"
        text += f". The loss of the step is {'equal' if is_equal else of_both}"
    return Finding(
        MISTAKES_OF_REPLICAS["state-differs"]
        if one.what is What.BUFFER
        else MISTAKES["gradients-differ"],
        lines,
        f"{text}.{more}",
        step=one.number,
        layer=one.name,
        values={"difference": one.size, "rounding": one.rounding, "parameters": len(one.names)},
        remedy=remedy,
        nature=nature,
        meant=meant,
        difference=one,
    )


def batch_norm(joined: JoinedRuns) -> Iterator[Finding]:
    """Tell that batch normalization uses the batch of a rank, and whether that was confirmed."""
    found = joined.comparison
    is_of_all = bool(found.steps) and found.whole is None and not joined.replay.in_parts
    is_confirmed = "batch-norm" in found.meant
    sizes = [one.samples for stream in joined.training[:1] for one in stream.first.batches[:1]]
    model = next((one for one in joined.ranks[0].models if one.batch_norms), None)
    if joined.size < 2 or model is None or not sizes or is_of_all:
        return
    text = (
        f"{listed(model.batch_norms)} of {model.class_name} "
        f"compute{'s' * (len(model.batch_norms) == 1)} statistics of the {sizes[0]} samples of "
        f"one rank, where one process with the global batch has {sizes[0] * joined.size}."
    )
    if is_confirmed:
        text += f" O{_IN_TURN[1:]} computes the same gradients."
    yield Finding(
        MISTAKES["batch-norm-of-one-rank"],
        [model.line],
        text,
        layer=model.batch_norms[0],
        values={"samples": sizes[0], "global": sizes[0] * joined.size},
        nature=Nature.MEANT if is_confirmed else None,
        meant="batch-norm" if is_confirmed else "",
        difference=found.whole if is_confirmed else None,
    )
