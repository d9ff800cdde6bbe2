"""Gradients that are clipped before the ranks exchange them."""

from collections.abc import Iterator

import numpy as np

from .....record.training.facts.steps import ClipFacts
from .....record.training.sketch_rows import SKETCH_SIZE
from ...exchange import Exchange, Kind
from ...mistakes import MISTAKES, Finding
from ...relations import Vectors, distance, solve, vectors
from ...steps import JointStep, shown
from ...view import View, unique
from .clipped_values import by_hooks, by_values

OWN = 1e-3  # relative difference of gradients that are those of a rank, or were clipped
SAME = 1e-5  # relative difference of equal gradients, and of equal norms
PART = 1e-4  # residual of a parameter's combination of the ranks' gradients
MOSTLY = 0.8  # of the parameters whose combination is known
LEAST_PARAMETERS = 2
LEAST_RANKS = 2  # with equal norms after clipping


def clipped_before_exchange(view: View) -> Iterator[Finding]:
    """Find gradients that each rank clips by the norm of its own gradient."""
    for one in view.exchanges:
        if any(step.clips for step in one.step.steps):
            found = _by_call(view, one)
        else:
            found = _by_hand(view, one) or _by_parameter(view, one)
        if found is not None:
            yield found
            return
    found = by_hooks(view) or by_values(view)
    if found is not None:
        yield found


def _by_call(view: View, one: Exchange) -> Finding | None:
    """Test calls of ``clip_grad_norm_``: were the gradients those of the rank alone?"""
    step = one.step
    clips = _own_clips(step)
    if not clips and one.kind in (Kind.OWN, Kind.LINEAR):
        clips = [facts.clips[0] for facts in step.steps if facts.clips]
    if not clips or not _are_equal(one):
        return None
    clip, norms = clips[0], [one.norm for one in clips]
    text = (
        f"In step {step.index + 1}, each rank clips its own gradient at {clip.limit:g}, and the "
        "ranks exchange what is left."
    )
    known = [norm for norm in norms if norm is not None]
    if len(known) == step.size:
        text += f" The norms before clipping are {_range(known)}."
    return Finding(
        MISTAKES["clipped-before-exchange"],
        unique([clip.line, *view.gradient_lines(), step.steps[0].line]),
        text,
        step=step.index + 1,
        values={"limit": clip.limit, **{f"norm_{r}": v for r, v in enumerate(known)}},
    )


def _own_clips(step: JointStep) -> list[ClipFacts]:
    """Return the first call on each rank that clips, where the gradients of the ranks differ."""
    for clips in zip(*(facts.clips for facts in step.steps), strict=False):
        names = set.intersection(*(set(clip.gradients) for clip in clips)) - step.sharded.keys()
        pairs = list(zip(step.ranks, clips, strict=True))
        before = [vectors(facts, clip.gradients) for facts, clip in pairs]
        after = [vectors(facts, clip.clipped) for facts, clip in pairs]
        clipped = any(
            distance(one[name], two[name]) > OWN
            for one, two in zip(before, after, strict=True)
            for name in names & two.keys()
        )
        if clipped and any(distance(before[0][n], one[n]) > OWN for one in before for n in names):
            return list(clips)
    return []


def _by_hand(view: View, one: Exchange) -> Finding | None:
    """Test for factors of each rank that make some of the norms equal: clipping by hand."""
    if one.kind is not Kind.LINEAR or not _are_equal(one):
        return None
    step, n = one.step, one.step.size
    factors = np.array(one.coefficients) * n
    if (factors <= 0).any() or (factors > 1 + 1e-3).any() or factors.min() > 1 - 1e-3:
        return None
    norms = [_norm(step.local(rank, one.last)) for rank in range(n)]
    clipped = [factor < 1 - 1e-3 for factor in factors]
    after = [
        norm * factor for norm, factor, was in zip(norms, factors, clipped, strict=True) if was
    ]
    if len(after) < LEAST_RANKS and all(clipped):
        return None
    if max(after) > 1.02 * min(after) or any(
        norm > 1.02 * max(after) for norm, was in zip(norms, clipped, strict=True) if not was
    ):
        return None
    return Finding(
        MISTAKES["clipped-before-exchange"],
        _lines(view, one),
        f"In step {step.index + 1}, the gradients of the ranks have the factors "
        f"{', '.join(f'{factor:.3g}' for factor in factors)} in the mean: each rank scales its own "
        f"gradient to a norm of {max(after):.3g} before the exchange.",
        step=step.index + 1,
        values={"norm": max(after)} | {f"factor_{r}": float(v) for r, v in enumerate(factors)},
    )


def _by_parameter(view: View, one: Exchange) -> Finding | None:
    """Test for factors of each rank and parameter that are at most 1: clipping by hooks."""
    if one.kind is not Kind.OTHER or not _are_equal(one):
        return None
    step, n = one.step, one.step.size
    local = [step.local(rank, one.last) for rank in range(n)]
    used = step.used(0)
    smaller: dict[str, list[float]] = {}
    fitting = known = 0
    for name in step.names:
        values, residual = solve(used, local, [name])
        if values is None:
            continue
        known += 1
        factors = [float(value) * n for value in values]
        if residual <= PART and all(0 < factor <= 1 + 1e-3 for factor in factors):
            fitting += 1
            if max(factors) - min(factors) > 1e-3:
                smaller[name] = factors
    if known < LEAST_PARAMETERS or fitting < MOSTLY * known or not smaller:
        return None
    name, factors = next(iter(smaller.items()))
    return Finding(
        MISTAKES["clipped-before-exchange"],
        _lines(view, one),
        f"In step {step.index + 1}, the gradients of {shown(name)} of the ranks have the factors "
        f"{', '.join(f'{factor:.3g}' for factor in factors)} in the mean, and other factors for "
        "other parameters: each rank scales its own gradients before the exchange.",
        step=step.index + 1,
        layer=shown(name),
        values={f"factor_{rank}": factor for rank, factor in enumerate(factors)},
    )


def clipped_by_part(view: View) -> Iterator[Finding]:
    """Find sharded models whose ranks clip by the norm of their part of the gradient."""
    for step in view.steps:
        norms = [[clip.norm for clip in facts.clips] for facts in step.steps]
        if not step.sharded or not norms[0] or len({len(one) for one in norms}) > 1:
            continue
        first = [one[0] for one in norms if one[0] is not None]
        if len(first) == step.size and max(first) > (1 + 1e-3) * min(first):
            yield Finding(
                MISTAKES["clipped-before-exchange"],
                unique([step.steps[0].clips[0].line, *step.lines]),
                f"In step {step.index + 1}, each rank clips its part of the gradient by the norm "
                f"of this part ({_range(first)}), and not by that of the whole gradient.",
                step=step.index + 1,
                values={f"norm_{rank}": norm for rank, norm in enumerate(first)},
                remedy="use torch.nn.utils.clip_grad_norm_ on the parameters of the sharded model "
                "(FSDP1: model.clip_grad_norm_), which sums over the ranks",
            )
            return


def _lines(view: View, one: Exchange) -> list[str]:
    step = one.step
    lines = [*view.lines_before_exchange(step), *view.hook_lines(step), *view.gradient_lines()]
    return unique([*lines, *reversed(step.lines)])


def _are_equal(one: Exchange) -> bool:
    """Return whether the optimizer used the same gradient on all ranks."""
    used = [one.step.used(rank) for rank in range(one.step.size)]
    return all(
        distance(used[0][name], other[name]) <= SAME for other in used for name in one.step.names
    )


def _norm(gradients: Vectors) -> float:
    return float(np.sqrt(sum(values[SKETCH_SIZE] ** 2 for values in gradients.values())))


def _range(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"
