"""Buffers and states that ranks have to agree on: batch normalization, scalers, averages."""

from collections.abc import Iterator

from ....record.training.facts.models import StateFacts
from ....record.training.facts.samples import Phase
from ..differences import STATISTICS
from ..mistakes import MISTAKES, Finding, Nature
from ..relations import Vector, distance, vectors
from ..steps import JointStep, shown
from ..view import View, listed

SAME = 1e-6  # relative difference of equal values
NEAR_PARAMETERS = 0.8  # median relative difference of averages from the parameters
AVERAGE = "average"
EVALUATED = "statistics"  # of a model that is evaluated and not trained
BUFFER = "buffer"
OWN = ("tensor", BUFFER)  # of the script, which may mean them to differ
KINDS = {
    "scaler": "gradient scaler",
    "schedule": "learning-rate schedule",
    AVERAGE: "averaged copy of the model",
    "tensor": "tensor",
    "buffer": "buffer",
    EVALUATED: "evaluated model",
}


def buffers_differ(view: View) -> Iterator[Finding]:
    """Find buffers, such as running statistics, that differ and that nothing makes equal."""
    broadcast = {
        model.key for model in view.ranks[0].models if model.wrapper and model.broadcasts_buffers
    }
    for step in view.steps[1:]:
        names = []
        for name in step.steps[0].buffers:
            key = name.partition("/")[0]
            if (key.isdigit() and int(key) in broadcast) or (broadcast and not key.isdigit()):
                continue
            values = _buffer(step, name)
            if any(distance(values[0], other) > SAME for other in values):
                names.append(name)
        if names:
            yield _of_buffers(view, step, names)


def _of_buffers(view: View, step: JointStep, names: list[str]) -> Finding:
    norms = [name for name in names if name.endswith(STATISTICS)]
    model = view.ranks[0].models[0] if view.ranks[0].models else None
    layers = list(dict.fromkeys(shown(one).rpartition(".")[0] for one in norms or names))
    seeds = view.seed_lines_of_ranks()
    kind, remedy = "state-differs", ""
    nature: Nature | None = Nature.QUESTION
    ends = [_buffer(one, names[0])[:1] for one in (view.steps[0], view.steps[-1])]
    text = f"The buffers {listed([shown(one) for one in names])} "
    if norms:
        kind, nature = "batch-norm-differs", Nature.QUESTION if _averages_buffers(view) else None
        text = (
            f"The running statistics of {listed(layers)} differ between the ranks after step "
            f"{step.index + 1}: each rank computes them from its own batches, and validates or "
            "saves its own ones."
        )
    elif seeds and all(ends) and distance(ends[0][0], ends[1][0]) <= SAME:
        kind, nature = "different-random-numbers", None
        text += (
            "have other values on each rank, and no step changes them: each rank trains a model "
            "with other constants."
        )
        remedy = "draw them with the same seed on all ranks, or broadcast buffers as well"
    else:
        text += f"differ between the ranks after step {step.index + 1}. Must they agree?"
    lines = [*seeds[:1] * (kind == "different-random-numbers"), *_made(view)]
    return Finding(
        MISTAKES[kind],
        [*lines, model.line if model is not None else "", *step.lines],
        text,
        step=step.index + 1,
        layer=layers[0] if norms else shown(names[0]),
        values={"buffers": len(names)},
        nature=nature,
        remedy=remedy,
    )


def _buffer(step: JointStep, name: str) -> list[Vector]:
    """Return a buffer of all ranks; [] if some do not have it."""
    pairs = list(zip(step.ranks, step.steps, strict=True))
    if any(name not in one.buffers for _, one in pairs):
        return []
    return [vectors(facts, {name: one.buffers[name]})[name] for facts, one in pairs]


def _on_all_ranks(view: View) -> dict[tuple[str, str, str, int], list[StateFacts]]:
    """Return the states that all ranks have, by kind, name, line and step."""
    by_rank = [
        {(one.kind, one.name, one.line, one.step): one for one in facts.states}
        for facts in view.ranks
    ]
    return {
        key: [one[key] for one in by_rank]
        for key in by_rank[0]
        if all(key in one for one in by_rank)
    }


def _are_apart(view: View, row: str, ours: StateFacts, theirs: StateFacts, rank: int) -> bool:
    """Return whether a tensor of a state differs between rank 0 and another rank."""
    one = vectors(view.ranks[0], {row: ours.rows[row]})[row]
    two = vectors(view.ranks[rank], {row: theirs.rows[row]})[row]
    return distance(one, two) > SAME


def _made(view: View) -> list[str]:
    """Return where a model without a wrapper was made, if it is known."""
    if any(model.wrapper for model in view.ranks[0].models):
        return []
    return [one.line for one in view.ranks[0].draws if one.place == "construction"][:1]


def differ(view: View) -> Iterator[Finding]:
    """Find scalers, schedules, averages and statistics whose values differ between the ranks."""
    differs = view.difference or view.comparison.doubtful
    told: set[str] = {"tensor"} if differs is None else set()
    for states in _on_all_ranks(view).values():
        ours = states[0]
        for rank, theirs in enumerate(states[1:], 1):
            if ours.kind in told:
                continue
            what = _difference(view, ours, theirs, rank)
            if not what or (ours.kind == AVERAGE and not _is_average(view, ours)):
                continue
            told.add(ours.kind)
            is_asked = ours.kind in OWN and (ours.kind != BUFFER or differs is None)
            yield Finding(
                MISTAKES["batch-norm-differs" if ours.kind == EVALUATED else "state-differs"],
                [*_changes(view, ours), ours.line],
                f"The {KINDS.get(ours.kind, ours.kind)} {ours.name} differs between ranks 0 and "
                f"{rank} after {ours.step} steps: {what}."
                + " Does the loss depend on it? Then it must agree." * is_asked
                + (f" {differs.sentence}." if differs is not None else ""),
                ranks=[rank],
                step=ours.step or None,
                values={"kind": ours.kind},
                nature=Nature.QUESTION if is_asked else None,
                difference=differs,
            )


def _is_average(view: View, ours: StateFacts) -> bool:
    """Return whether tensors with the names of parameters are near these: gradients are not."""
    steps = view.ranks[0].steps[: ours.step]
    rows = steps[-1].parameters if steps else {}
    names = [name for name in ours.rows if name in rows]
    if not names:
        return True
    one, two = vectors(view.ranks[0], ours.rows), vectors(view.ranks[0], rows)
    return sorted(distance(one[n], two[n]) for n in names)[len(names) // 2] < NEAR_PARAMETERS


def _changes(view: View, ours: StateFacts) -> list[str]:
    """Return the lines that change a state, if it was equal on all ranks before."""
    same = [
        [one for one in facts.states if (one.kind, one.name) == (ours.kind, ours.name)]
        for facts in view.ranks
    ]
    if ours.kind == "scaler" and ours is same[0][0]:
        return []  # made with other values
    return [line for each in same for one in each for line in one.changed_by]


def _difference(view: View, ours: StateFacts, theirs: StateFacts, rank: int) -> str:
    for name, value in ours.values.items():
        other = theirs.values.get(name)
        if other is not None and abs(other - value) > SAME * max(abs(value), abs(other)):
            return f"{name} is {value:.6g} and {other:.6g}"
    sharded = {str(one.key) for one in view.ranks[0].models if one.is_sharded}
    for name in ours.rows:
        is_compared = name in theirs.rows and name.partition("/")[0] not in sharded
        if is_compared and _are_apart(view, name, ours, theirs, rank):
            return f"the values of {shown(name)} differ"
    return ""


def _averages_buffers(view: View) -> bool:
    """Return whether collectives outside of steps may make buffers equal before they are used."""
    return any(
        one.phase is Phase.EVALUATION or (one.kind.startswith("broadcast") and one.step > 0)
        for one in view.ranks[0].collectives
        if not one.is_in_backward and one.kind not in ("barrier",)
    )
