"""Buffers and states that ranks have to agree on: batch normalization, scalers, averages."""

from collections.abc import Iterator

from ....record.training.facts.models import StateFacts
from ....record.training.facts.samples import Phase
from ..differences import STATISTICS
from ..mistakes import MISTAKES, Finding, Nature
from ..relations import distance, vectors
from ..steps import shown
from ..view import View, listed, unique

SAME = 1e-6  # relative difference of equal values
LEAST_STEPS = 3  # in which a constant does not change
STATISTICS_KIND = "statistics"  # of a model that is evaluated and not trained
BUFFER = "buffer"
OWN = ("tensor", BUFFER)  # of the script, which may mean them to differ
KINDS = {
    "scaler": "gradient scaler",
    "schedule": "learning-rate schedule",
    "average": "averaged copy of the model",
    "tensor": "tensor",
    "buffer": "buffer",
}


def batch_norm_differs(view: View) -> Iterator[Finding]:
    """Find running statistics that differ between the ranks, and that nothing makes equal."""
    if view.size < 2 or view.is_model_parallel:
        return
    broadcast = {
        model.key for model in view.ranks[0].models if model.wrapper and model.broadcasts_buffers
    }
    for step in view.steps[1:]:
        rows = [facts.buffers for facts in step.steps]
        names = []
        for name in rows[0]:
            key = name.partition("/")[0]
            if (key.isdigit() and int(key) in broadcast) or (broadcast and not key.isdigit()):
                continue
            if not all(name in one for one in rows):
                continue
            values = [
                vectors(f, {name: r[name]})[name] for f, r in zip(view.ranks, rows, strict=True)
            ]
            if any(distance(values[0], other) > SAME for other in values[1:]):
                names.append(name)
        norms = [name for name in names if name.endswith(STATISTICS)]
        if not names:
            continue
        others = _averages_buffers(view)
        model = view.ranks[0].models[0] if view.ranks[0].models else None
        layers = list(dict.fromkeys(shown(one).rpartition(".")[0] for one in norms or names))
        if norms:
            text = (
                f"The running statistics of {listed(layers)} differ between the ranks after step "
                f"{step.index + 1}: each rank computes them from its own batches, and validates "
                "or saves its own ones."
            )
        else:
            text = (
                f"The buffers {listed([shown(one) for one in names])} differ between the ranks "
                f"after step {step.index + 1}. Must they agree?"
            )
        yield Finding(
            MISTAKES["batch-norm-differs" if norms else "state-differs"],
            unique([*_made(view), model.line if model is not None else "", *step.lines]),
            text,
            step=step.index + 1,
            layer=layers[0],
            values={"buffers": len(names)},
            nature=Nature.QUESTION if others or not norms else None,
        )
        return


def evaluated_statistics(view: View) -> Iterator[Finding]:
    """Find a model that is evaluated with other running statistics on each rank."""
    if view.size < 2 or view.is_model_parallel:
        return
    for (kind, name, line, step), states in _on_all_ranks(view).items():
        if kind != STATISTICS_KIND:
            continue
        ours, theirs = states[0], states[1:]
        off = [
            row
            for row in ours.rows
            for rank, other in enumerate(theirs, 1)
            if row in other.rows and _are_apart(view, row, ours, other, rank)
        ]
        if not off:
            continue
        layers = list(dict.fromkeys(shown(one).rpartition(".")[0] for one in off))
        yield Finding(
            MISTAKES["batch-norm-differs"],
            unique([*ours.changed_by, line]),
            f"{name} is evaluated after {step} steps with running statistics of {listed(layers)} "
            "that differ between the ranks: each rank has computed them from its own batches.",
            step=step or None,
            layer=layers[0],
            values={"buffers": len(off)},
            remedy="compute the statistics from the batches of all ranks, or broadcast those of "
            "one rank",
        )
        return


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


def drawn_buffers(view: View) -> Iterator[Finding]:
    """Find buffers that no step changes, and that each rank has drawn for itself."""
    seeds = view.seed_lines("torch", are_equal=False) + view.seed_lines("numpy", are_equal=False)
    if view.size < 2 or view.is_model_parallel or len(view.steps) < LEAST_STEPS or not seeds:
        return
    first, last = view.steps[0], view.steps[-1]
    names = [
        name
        for name in first.steps[0].buffers
        if all(name in one.buffers for step in (first, last) for one in step.steps)
        and not name.endswith(STATISTICS)
    ]
    found = []
    for name in names:
        values = [
            [
                vectors(facts, {name: one.buffers[name]})[name]
                for facts, one in zip(view.ranks, step.steps, strict=True)
            ]
            for step in (first, last)
        ]
        is_constant = all(distance(a, b) <= SAME for a, b in zip(*values, strict=True))
        if is_constant and any(distance(values[0][0], other) > SAME for other in values[0][1:]):
            found.append(name)
    if found:
        yield Finding(
            MISTAKES["different-random-numbers"],
            unique([*seeds[:1], *_made(view), *(one.line for one in view.ranks[0].models)]),
            f"The buffers {listed([shown(one) for one in found])} have other values on each rank, "
            "and no step changes them: each rank trains a model with other constants.",
            layer=shown(found[0]),
            values={"buffers": len(found)},
            remedy="draw them with the same seed on all ranks, or broadcast buffers as well",
        )


def _made(view: View) -> list[str]:
    """Return where a model without a wrapper was made, if it is known."""
    if any(model.wrapper for model in view.ranks[0].models):
        return []
    return [one.line for one in view.ranks[0].draws if one.place == "construction"][:1]


def differ(view: View) -> Iterator[Finding]:
    """Find scalers, schedules and averages whose values differ between the ranks."""
    if view.size < 2 or view.is_model_parallel:
        return
    differs = view.difference or view.comparison.doubtful
    told = {STATISTICS_KIND, *(() if differs is not None else ("tensor",))}
    for states in _on_all_ranks(view).values():
        ours = states[0]
        for rank, theirs in enumerate(states[1:], 1):
            if ours.kind in told:
                continue
            what = _difference(view, ours, theirs, rank)
            if not what:
                continue
            told.add(ours.kind)
            is_asked = ours.kind in OWN and (ours.kind != BUFFER or differs is None)
            yield Finding(
                MISTAKES["state-differs"],
                unique([*_changes(view, ours), ours.line]),
                f"The {KINDS.get(ours.kind, ours.kind)} {ours.name} differs between ranks 0 and "
                f"{rank} after {ours.step} steps: {what}."
                + " Does the loss depend on it? Then it must agree." * is_asked
                + (f" {differs.text[0].upper()}{differs.text[1:]}." if differs is not None else ""),
                ranks=[rank],
                step=ours.step or None,
                values={"kind": ours.kind},
                nature=Nature.QUESTION if is_asked else None,
                difference=differs,
            )


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
