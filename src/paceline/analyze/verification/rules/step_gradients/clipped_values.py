"""Gradients whose elements are clipped before the exchange: by hooks, or by hand."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .....record.training.facts.ranks import RankFacts
from .....record.training.facts.steps import BackwardFacts
from ...exchange import Exchange, Kind
from ...mistakes import MISTAKES, Finding
from ...relations import fit, peak, vectors
from ...steps import JointStep
from ...view import View, is_reduction, unique

SMALLER = 1 - 1e-3  # a clipped value, relative to the value before, is smaller than this
LEAST_EQUAL = 3  # clipped values that are equal
LEAST_RANKS = 2  # that have them
SCALED = 1e-5  # residual of gradients that a hook multiplies by a number


@dataclass(frozen=True)
class _Clipped:
    """A largest value, or a norm, that was made smaller.

    Attributes:
        rank, step: Where.
        before, after: The values.
    """

    rank: int
    step: int
    before: float
    after: float


def by_hooks(view: View) -> Finding | None:
    """Return a finding if hooks of the script clip the gradients that a rank has computed."""
    one = next((x for x in view.exchanges if _raw(x.step)), None)
    if one is None or hook_factor(one) is not None:
        return None
    found = _common(list(_of_hooks(view)))
    if found is None:
        return None
    return _finding(view, one.step, found, view.hook_lines(one.step), "a hook on the gradients")


def by_values(view: View) -> Finding | None:
    """Return a finding if the largest value that ranks send is the same in several steps."""
    odd = [one for one in view.exchanges if one.kind is Kind.OTHER or one.others]
    if not odd:
        return None
    found = _common([clipped for one in odd for clipped in _sent(view, one)])
    if found is None:
        return None
    step = next(one.step for one in odd if one.step.index == found.step)
    lines = [*view.lines_before_exchange(step), *view.hook_lines(step), *view.gradient_lines()]
    return _finding(view, step, found, lines, "each rank")


def hook_factor(one: Exchange) -> float | None:
    """Return the number by which hooks multiply all gradients; 1 without hooks; None if none."""
    found = [_factors(f, s.backwards) for f, s in zip(one.step.ranks, one.step.steps, strict=True)]
    factors = [factor for each in found if each is not None for factor in each]
    first = factors[0] if factors else 1.0
    are_known = None not in found
    return first if are_known and all(abs(x - first) <= SCALED * first for x in factors) else None


def hook_ratio(view: View, one: Exchange) -> float:
    """Return that number, relative to that of the script on one rank; 1 if it is not known."""
    ours = hook_factor(one)
    steps = view.single.steps[:1] if view.single is not None else []
    theirs = [_factors(view.single, step.backwards) for step in steps] if view.single else []
    if ours is None or not theirs or not theirs[0]:
        return 1.0
    return ours / theirs[0][0]


def _factors(facts: RankFacts, backwards: Sequence[BackwardFacts]) -> list[float] | None:
    """Return the factors of hooks in some backwards; None if they are no factors."""
    found = []
    for each in backwards:
        names = list(each.gradients)
        if not names:
            continue
        after = vectors(facts, each.gradients)
        before = vectors(facts, {name: each.raw.get(name, each.gradients[name]) for name in names})
        fitted = fit(after, before, names)
        if fitted.residual > SCALED or fitted.factor <= 0:
            return None
        found.append(fitted.factor)
    return found


def _raw(step: JointStep) -> bool:
    return any(one.raw for backwards in step.backwards for one in backwards)


def _of_hooks(view: View) -> Iterator[_Clipped]:
    for one in view.exchanges:
        for rank, backwards in enumerate(one.step.backwards):
            facts = view.ranks[rank]
            for each in backwards:
                for name, row in each.raw.items():
                    after = each.gradients.get(name)
                    if after is None:
                        continue
                    for before, value in (
                        (peak(facts, row), peak(facts, after)),
                        (_norm(facts, row), _norm(facts, after)),
                    ):
                        yield _Clipped(rank, one.step.index, before, value)


def _sent(view: View, one: Exchange) -> Iterator[_Clipped]:
    """Yield the largest value that each rank computed in a step, and the largest that it sent."""
    for rank, facts in enumerate(view.ranks):
        number = next(at for at, x in enumerate(facts.steps) if x is one.step.steps[rank])
        sent = [
            each.peak
            for each in facts.collectives
            if each.step == number and each.peak >= 0 and is_reduction(each)
        ]
        backwards = one.step.backwards[rank][-one.last :]
        peaks = [sum(_peaks(facts, name, backwards)) for name in one.step.names]
        if sent and peaks:
            yield _Clipped(rank, one.step.index, max(peaks), max(sent))


def _peaks(facts: RankFacts, name: str, backwards: Sequence[BackwardFacts]) -> list[float]:
    return [peak(facts, b.gradients[name]) / b.scale for b in backwards if name in b.gradients]


def _norm(facts: RankFacts, row: int) -> float:
    return float(vectors(facts, {"": row})[""][-1])


def _common(values: Sequence[_Clipped]) -> _Clipped | None:
    """Return the first of the values that were made equal on several ranks."""
    smaller = [one for one in values if 0 < one.after < SMALLER * one.before]
    counts = Counter(f"{one.after:.5e}" for one in smaller)
    for text, count in counts.most_common(1):
        equal = [one for one in smaller if f"{one.after:.5e}" == text]
        before = {f"{one.before:.3e}" for one in equal}
        if count >= LEAST_EQUAL and len(before) > 1 and len({x.rank for x in equal}) >= LEAST_RANKS:
            return equal[0]
    return None


def _finding(
    view: View, step: JointStep, found: _Clipped, lines: Sequence[str], who: str
) -> Finding:
    return Finding(
        MISTAKES["clipped-before-exchange"],
        unique([*lines, *step.lines]),
        f"In step {step.index + 1}, {who} limits the gradient of rank {found.rank} from "
        f"{found.before:.4g} to {found.after:.4g}, and other ranks and steps to the same value, "
        "before the exchange: the mean of clipped gradients is not the clipped mean.",
        step=step.index + 1,
        values={"before": found.before, "after": found.after},
    )
