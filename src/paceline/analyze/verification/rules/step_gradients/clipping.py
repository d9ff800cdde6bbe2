"""Gradients that are clipped before the ranks exchange them."""

from collections.abc import Iterator

from .....record.training.facts.steps import ClipFacts
from ...exchange import Exchange, Kind
from ...mistakes import MISTAKES, Finding
from ...relations import distance, vectors
from ...steps import JointStep
from ...view import View

OWN = 1e-3  # relative difference of gradients that are those of a rank, or were clipped
SAME = 1e-5  # relative difference of equal gradients


def clipped_before_exchange(view: View) -> Iterator[Finding]:
    """Find gradients that each rank clips by the norm of its own gradient."""
    for one in view.exchanges:
        if (found := _by_call(view, one)) is not None:
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
        [clip.line, *view.gradient_lines(), step.steps[0].line],
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


def _are_equal(one: Exchange) -> bool:
    """Return whether the optimizer used the same gradient on all ranks."""
    used = [one.step.used(rank) for rank in range(one.step.size)]
    return all(
        distance(used[0][name], other[name]) <= SAME for other in used for name in one.step.names
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"
