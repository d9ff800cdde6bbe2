"""Replicas that start different, or become different."""

from collections.abc import Iterator, Mapping, Sequence

from ....record.training.facts.models import ModelFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.steps import StepFacts
from ..mistakes import MISTAKES, Finding
from ..relations import checksum, distance, vectors
from ..steps import JointStep, misaligned, shown
from ..view import View, listed, ranks_text

SAME = 1e-6  # relative difference of equal parameters
OF_UPDATE = 1e-3  # difference of replicas, relative to the update, that rounding does not make


def start_different(view: View) -> Iterator[Finding]:
    """Find parameters with different values on the ranks at the first forward."""
    for model in view.ranks[0].models:
        others = [_same_model(facts, model) for facts in view.ranks[1:]]
        if model.is_sharded or not model.first or any(one is None for one in others):
            continue
        models = [model, *(one for one in others if one is not None)]
        different = _different(view.ranks, [one.first for one in models])
        names = [name for name in different if name not in model.ignored]
        if not names:
            continue
        ranks = sorted({rank for name in names for rank in different[name]})
        few = len(names) < len(model.first)
        what = listed(names) if few else f"all {len(names)} parameters"
        was_equal = _were_equal(view, models, names)
        yield Finding(
            MISTAKES["replicas-start-different"],
            [*_restored_lines(view), *_made_lines(view, model, was_equal)],
            f"At the first forward, {what} of {model.class_name} differ between rank 0 and "
            f"{ranks_text(ranks, view.size).lower()}"
            + (
                f"; {len(model.first) - len(names)} other parameters are equal."
                if few
                else ": the ranks train from different starting points, and nothing makes them "
                "equal."
            )
            + " They were equal when it was wrapped, and changed later." * was_equal,
            ranks=ranks,
            layer=names[0],
            values={"parameters": len(names), "of": len(model.first)},
        )


def _were_equal(view: View, models: Sequence[ModelFacts], names: Sequence[str]) -> bool:
    """Return whether parameters were equal on all ranks before the model was wrapped."""
    before = [one.initial for one in models]
    are_known = all(name in one for one in before for name in names)
    is_wrapped = bool(models[0].wrapper)
    return is_wrapped and are_known and not set(_different(view.ranks, before)) & set(names)


def _made_lines(view: View, model: ModelFacts, was_equal: bool) -> list[str]:
    """Return a line that gave ranks different seeds, and lines that made the model.

    was_equal: Whether it was equal on all ranks when it was made.
    """
    if was_equal:
        return [model.line]
    made = view.ranks[0].draws
    drawn = [one.line for one in made if one.place == "construction" and one.line]
    seeds = view.seed_lines("torch", are_equal=False)[:1]
    return [*seeds, *drawn[:1], model.line, *drawn[1:]]


def _restored_lines(view: View) -> list[str]:
    """Return lines that restored a model before the training on some ranks only."""
    by_rank = [
        {one.line for one in facts.restores if one.what == "model" and one.step == 0}
        for facts in view.ranks
    ]
    everywhere = set.intersection(*by_rank)
    return sorted(set.union(*by_rank) - everywhere)


def skipped_steps(view: View) -> Iterator[Finding]:
    """Find ranks that leave out an optimizer's step that others make."""
    for optimizer, index in misaligned(view.ranks).items():
        steps = [
            next((s for s in f.steps if (s.optimizer, s.index) == (optimizer, index)), None)
            for f in view.ranks
        ]
        counts = [len(one.backwards) if one is not None else 0 for one in steps]
        least = min(count for count in counts if count)
        ranks = [rank for rank, count in enumerate(counts) if count > least]
        done = [len([s for s in f.steps if s.optimizer == optimizer]) for f in view.ranks]
        # With as many steps on all ranks, a step may only have other numbers of batches. A gradient
        # that was computed and cleared, though, is one of a step that was left out.
        cleared = [one is not None and _clears(one) for one in steps]
        is_skipped = len(set(done)) > 1 or (any(cleared) and not all(cleared))
        if not ranks or not is_skipped:
            continue
        line = next(one.line for one in steps if one is not None)
        yield Finding(
            MISTAKES["replicas-diverge"],
            [line, *(b.line for one in steps if one for b in one.backwards[-1:])],
            f"{ranks_text(ranks, view.size)} ran {max(counts)} backwards before step {index + 1}, "
            f"and the other ranks {least}: a step was left out there, and the parameters differ "
            "from then on.",
            ranks=ranks,
            step=index + 1,
            values={f"steps_{rank}": count for rank, count in enumerate(done)},
            remedy="make each step on all ranks, or on none: decide by a value that is equal on "
            "all ranks",
        )


def _clears(step: StepFacts) -> bool:
    """Return whether gradients of a backward of a step were cleared, and those of others used."""
    known = [bool(one.gradients) for one in step.backwards]
    return any(known) and not all(known)


def diverge(view: View) -> Iterator[Finding]:
    """Find parameters that become different in a step, or between two steps."""
    if view.averages_parameters:
        return
    for step in view.steps:
        own = {n for n in step.steps[0].parameters if n in step.sharded or view.is_flat(n)}
        for is_before in (True, False):
            if is_before and not step.index:
                continue
            rows = [one.before if is_before else one.parameters for one in step.steps]
            rows = [{n: row for n, row in one.items() if n not in own} for one in rows]
            found = _different(view.ranks, rows)
            if not is_before:
                found = {name: x for name, x in found.items() if _exceeds_rounding(step, name)}
            if found:
                yield _apart(view, step, found, len(rows[0]), is_before)


def _apart(
    view: View, step: JointStep, found: Mapping[str, list[int]], of: int, is_before: bool
) -> Finding:
    """Return the finding of parameters that differ before a step, or after it."""
    ranks = sorted({rank for each in found.values() for rank in each})
    names = [shown(one) for one in found]
    changed = [line for one in step.steps for line in one.value_lines] if is_before else []
    text = f"differ between rank 0 and {ranks_text(ranks, view.size).lower()}"
    if is_before:
        text = (
            f"Before step {step.index + 1}, {listed(names)} {text}, and after step {step.index} "
            "they did not: the script changes them outside of the optimizer's step."
        )
    else:
        text = f"After step {step.index + 1}, {listed(names)} {text}"
        rest = of - len(found)
        text += f"; {rest} other parameters are equal." if rest else "."
        text += _gradients_too(step, list(found))
    return Finding(
        MISTAKES["replicas-diverge"],
        [*changed, step.steps[0].line, *step.lines],
        text,
        ranks=ranks,
        step=step.index + 1,
        layer=names[0],
        values={"parameters": len(found), "of": of},
    )


def _same_model(facts: RankFacts, model: ModelFacts) -> ModelFacts | None:
    return next(
        (one for one in facts.models if (one.key, one.class_name) == (model.key, model.class_name)),
        None,
    )


def _different(
    ranks: Sequence[RankFacts], rows: Sequence[Mapping[str, int]]
) -> dict[str, list[int]]:
    """Return by parameter the ranks whose values differ from rank 0's."""
    found: dict[str, list[int]] = {}
    for rank in range(1, len(ranks)):
        for name, row in rows[0].items():
            if name not in rows[rank]:
                continue
            other = rows[rank][name]
            if checksum(ranks[0], row) == checksum(ranks[rank], other):
                continue
            one = vectors(ranks[0], {name: row})[name]
            two = vectors(ranks[rank], {name: other})[name]
            if distance(one, two) > SAME:
                found.setdefault(name, []).append(rank)
    return found


def _exceeds_rounding(step: JointStep, name: str) -> bool:
    """Return whether the replicas differ by more than a small part of the step's update."""
    after = [
        vectors(facts, {name: one.parameters[name]})[name]
        for facts, one in zip(step.ranks, step.steps, strict=True)
        if name in one.parameters
    ]
    difference = max(distance(after[0], other) for other in after[1:])
    before = step.steps[0].before.get(name)
    if before is None:
        return difference > SAME
    update = distance(after[0], vectors(step.ranks[0], {name: before})[name])
    return difference > max(OF_UPDATE * update, SAME)


def _gradients_too(step: JointStep, names: Sequence[str]) -> str:
    """Return a sentence about the gradients that led to it."""
    rows = [facts.gradients for facts in step.steps]
    known = [name for name in names if all(name in one for one in rows)]
    if not known:
        return ""
    used = [vectors(f, {n: r[n] for n in known}) for f, r in zip(step.ranks, rows, strict=True)]
    if any(distance(used[0][n], other[n]) > SAME for other in used[1:] for n in known):
        return " Their gradients differ as well."
    return " Their gradients are equal: the optimizers, or what changes the parameters, differ."
