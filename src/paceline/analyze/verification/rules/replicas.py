"""Parameters, gradients, buffers and states that ranks have to agree on, at the start and later."""

from collections.abc import Iterator, Mapping, Sequence

from ....observe.facts.models import AVERAGE, ModelFacts, StateFacts
from ....observe.facts.ranks import RankFacts
from ....observe.facts.samples import Phase
from ....observe.facts.steps import StepFacts
from ..comparison import STATISTICS
from ..exchange import Exchange, Kind
from ..joined_runs import JoinedRuns, listed, ranks_text
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..relations import EQUAL_WITHIN, differing_ranks, distance, median, vectors
from ..steps import JointStep, find_step, misaligned, numel, parameters, shown

OF_UPDATE = 1e-3  # difference of replicas, relative to the update, that rounding does not make
BYTES_PER_VALUE = 4  # of a value
NEAR_PARAMETERS = 0.8  # median relative difference of averages from the parameters
EVALUATED = "statistics"  # of a model that is evaluated and not trained
BUFFER = "buffer"
KINDS_OF_SCRIPT = ("tensor", BUFFER)  # of the script, which may mean them to differ
KINDS = {
    "scaler": "gradient scaler",
    "schedule": "learning-rate schedule",
    AVERAGE: "averaged copy of the model",
    "tensor": "tensor",
    "buffer": "buffer",
    EVALUATED: "evaluated model",
}

MISTAKES = by_id(
    Mistake(
        "gradients-not-exchanged",
        "Gradients are not exchanged between the ranks",
        "the gradients that the ranks compute and use",
        "call the model through its DistributedDataParallel wrapper, leave no_sync before the "
        "last backward of a step, and wrap a model whose trained parameters require gradients",
        explains=ids(
            "replicas-diverge gradients-differ gradients-summed gradients-divided-twice "
            "uneven-batches-averaged clipped-before-exchange accumulation-divided-wrongly "
            "state-differs batch-norm-differs"
        ),
    ),
    Mistake(
        "replicas-start-different",
        "Ranks start with different parameters",
        "parameters of the ranks at the first forward",
        "set the same seed on all ranks before the model is made, or broadcast rank 0's "
        "parameters (DistributedDataParallel does so)",
        explains=ids("replicas-diverge gradients-differ state-differs batch-norm-differs"),
    ),
    Mistake(
        "replicas-diverge",
        "Parameters of the ranks become different",
        "parameters of the ranks before and after each step, and the steps that each makes",
        "let each parameter be changed in the same way on all ranks",
        explains=ids("state-differs gradients-differ"),
    ),
    Mistake(
        "batch-norm-differs",
        "Statistics of batch normalization differ between the ranks",
        "running statistics of the ranks",
        "use SyncBatchNorm, or keep broadcast_buffers=True",
        explains=("batch-norm-of-one-rank",),
    ),
    Mistake(
        "state-differs",
        "A state differs between the ranks",
        "buffers, scalers, schedules and averages of the ranks; buffers also of one process",
        "update it by values that are equal on all ranks",
    ),
)


def start_different(joined: JoinedRuns) -> Iterator[Finding]:
    """Find parameters with different values on the ranks at the first forward."""
    for model in joined.ranks[0].models:
        others = [_same_model(facts, model) for facts in joined.ranks[1:]]
        if model.is_sharded or not model.first or any(one is None for one in others):
            continue
        models = [model, *(one for one in others if one is not None)]
        different = differing_ranks(joined.ranks, [one.first for one in models])
        names = [name for name in different if name not in model.ignored]
        if not names:
            continue
        ranks = sorted({rank for name in names for rank in different[name]})
        few = len(names) < len(model.first)
        what = listed(names) if few else f"all {len(names)} parameters"
        was_equal = _were_equal(joined, models, names)
        yield Finding(
            MISTAKES["replicas-start-different"],
            [*_restored_lines(joined), *_made_lines(joined, model, was_equal)],
            f"At the first forward, {what} of {model.class_name} differ between rank 0 and "
            f"{ranks_text(ranks, joined.size).lower()}"
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


def _were_equal(joined: JoinedRuns, models: Sequence[ModelFacts], names: Sequence[str]) -> bool:
    """Return whether parameters were equal on all ranks before the model was wrapped."""
    before = [one.initial for one in models]
    are_known = all(name in one for one in before for name in names)
    is_wrapped = bool(models[0].wrapper)
    return is_wrapped and are_known and not set(differing_ranks(joined.ranks, before)) & set(names)


def _made_lines(joined: JoinedRuns, model: ModelFacts, was_equal: bool) -> list[str]:
    """Return a line that gave ranks different seeds, and lines that made the model.

    was_equal: Whether it was equal on all ranks when it was made.
    """
    if was_equal:
        return [model.line]
    made = joined.ranks[0].draws
    drawn = [one.line for one in made if one.place == "construction" and one.line]
    seeds = joined.seed_lines("torch", are_equal=False)[:1]
    return [*seeds, *drawn[:1], model.line, *drawn[1:]]


def _restored_lines(joined: JoinedRuns) -> list[str]:
    """Return lines that restored a model before the training on some ranks only."""
    by_rank = [
        {one.line for one in facts.restores if one.what == "model" and one.step == 0}
        for facts in joined.ranks
    ]
    everywhere = set.intersection(*by_rank)
    return sorted(set.union(*by_rank) - everywhere)


def skipped_steps(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks that leave out an optimizer's step that others make."""
    for optimizer, index in misaligned(joined.ranks).items():
        steps = [find_step(facts.steps, (optimizer, index)) for facts in joined.ranks]
        counts = [len(one.backwards) if one is not None else 0 for one in steps]
        least = min(count for count in counts if count)
        ranks = [rank for rank, count in enumerate(counts) if count > least]
        done = [len([s for s in f.steps if s.optimizer == optimizer]) for f in joined.ranks]
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
            f"{ranks_text(ranks, joined.size)} ran {max(counts)} backwards before step "
            f"{index + 1}, and the other ranks {least}: a step was left out there, and the "
            "parameters differ from then on.",
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


def diverge(joined: JoinedRuns) -> Iterator[Finding]:
    """Find parameters that become different in a step, or between two steps."""
    if joined.averages_parameters:
        return
    for step in joined.steps:
        own = {n for n in step.steps[0].parameters if n in step.sharded or joined.is_flat(n)}
        for is_before in (True, False):
            if is_before and not step.index:
                continue
            rows = [one.before if is_before else one.parameters for one in step.steps]
            rows = [{n: row for n, row in one.items() if n not in own} for one in rows]
            found = differing_ranks(joined.ranks, rows)
            if not is_before:
                found = {name: x for name, x in found.items() if _exceeds_rounding(step, name)}
            if found:
                yield _apart(joined, step, found, len(rows[0]), is_before)


def _apart(
    joined: JoinedRuns, step: JointStep, found: Mapping[str, list[int]], of: int, is_before: bool
) -> Finding:
    """Return the finding of parameters that differ before a step, or after it."""
    ranks = sorted({rank for each in found.values() for rank in each})
    names = [shown(one) for one in found]
    changed = [line for one in step.steps for line in one.value_lines] if is_before else []
    text = f"differ between rank 0 and {ranks_text(ranks, joined.size).lower()}"
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
        return difference > EQUAL_WITHIN
    update = distance(after[0], vectors(step.ranks[0], {name: before})[name])
    return difference > max(OF_UPDATE * update, EQUAL_WITHIN)


def _gradients_too(step: JointStep, names: Sequence[str]) -> str:
    """Return a sentence about the gradients that led to it."""
    rows = [{n: x.gradients[n] for n in names if n in x.gradients} for x in step.steps]
    if not rows[0]:
        return ""
    if differing_ranks(step.ranks, rows):
        return " Their gradients differ as well."
    return " Their gradients are equal: the optimizers, or what changes the parameters, differ."


def buffers_differ(joined: JoinedRuns) -> Iterator[Finding]:
    """Find buffers, such as running statistics, that differ and that nothing makes equal."""
    broadcast = {
        model.key for model in joined.ranks[0].models if model.wrapper and model.broadcasts_buffers
    }
    for step in joined.steps[1:]:
        names = []
        for name in differing_ranks(step.ranks, [one.buffers for one in step.steps]):
            key = name.partition("/")[0]
            if not (int(key) in broadcast if key.isdigit() else broadcast):
                names.append(name)
        if names:
            yield _of_buffers(joined, step, names)


def _of_buffers(joined: JoinedRuns, step: JointStep, names: list[str]) -> Finding:
    norms = [name for name in names if name.endswith(STATISTICS)]
    model = joined.ranks[0].models[0] if joined.ranks[0].models else None
    layers = list(dict.fromkeys(shown(one).rpartition(".")[0] for one in norms or names))
    text = (
        f"The buffers {listed([shown(one) for one in names])} differ between the ranks after step "
        f"{step.index + 1}. Must they agree?"
    )
    if norms:
        text = (
            f"The running statistics of {listed(layers)} differ between the ranks after step "
            f"{step.index + 1}: each rank computes them from its own batches, and validates or "
            "saves its own ones."
        )
    return Finding(
        MISTAKES["batch-norm-differs" if norms else "state-differs"],
        [*_made(joined), model.line if model is not None else "", *step.lines],
        text,
        step=step.index + 1,
        layer=layers[0] if norms else shown(names[0]),
        values={"buffers": len(names)},
        nature=None if norms and not _averages_statistics(joined, norms) else Nature.QUESTION,
    )


def _on_all_ranks(joined: JoinedRuns) -> dict[tuple[str, str, str, int], list[StateFacts]]:
    """Return the states that all ranks have, by kind, name, line and step."""
    by_rank = [
        {(one.kind, one.name, one.line, one.step): one for one in facts.states}
        for facts in joined.ranks
    ]
    return {
        key: [one[key] for one in by_rank]
        for key in by_rank[0]
        if all(key in one for one in by_rank)
    }


def _made(joined: JoinedRuns) -> list[str]:
    """Return where a model without a wrapper was made, if it is known."""
    if any(model.wrapper for model in joined.ranks[0].models):
        return []
    return [one.line for one in joined.ranks[0].draws if one.place == "construction"][:1]


def differ(joined: JoinedRuns) -> Iterator[Finding]:
    """Find scalers, schedules, averages and statistics whose values differ between the ranks."""
    differs = joined.difference or joined.comparison.doubtful
    named: set[str] = {"tensor"} if differs is None else set()
    for states in _on_all_ranks(joined).values():
        ours = states[0]
        for rank, theirs in enumerate(states[1:], 1):
            if ours.kind in named:
                continue
            what = _difference(joined, ours, theirs, rank)
            if not what or (ours.kind == AVERAGE and not _is_average(joined, ours)):
                continue
            named.add(ours.kind)
            is_asked = ours.kind in KINDS_OF_SCRIPT and (ours.kind != BUFFER or differs is None)
            yield Finding(
                MISTAKES["batch-norm-differs" if ours.kind == EVALUATED else "state-differs"],
                [*_changes(joined, ours), ours.line],
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


def _is_average(joined: JoinedRuns, ours: StateFacts) -> bool:
    """Return whether tensors with the names of parameters are near these: gradients are not."""
    steps = joined.ranks[0].steps[: ours.step]
    rows = steps[-1].parameters if steps else {}
    names = [name for name in ours.rows if name in rows]
    if not names:
        return True
    one, two = vectors(joined.ranks[0], ours.rows), vectors(joined.ranks[0], rows)
    return median(distance(one[n], two[n]) for n in names) < NEAR_PARAMETERS


def _changes(joined: JoinedRuns, ours: StateFacts) -> list[str]:
    """Return the lines that change a state, if it was equal on all ranks before."""
    same = [
        [one for one in facts.states if (one.kind, one.name) == (ours.kind, ours.name)]
        for facts in joined.ranks
    ]
    if ours.kind == "scaler" and ours is same[0][0]:
        return []  # made with other values
    return [line for each in same for one in each for line in one.changed_by]


def _difference(joined: JoinedRuns, ours: StateFacts, theirs: StateFacts, rank: int) -> str:
    for name, value in ours.values.items():
        other = theirs.values.get(name)
        if other is not None and abs(other - value) > EQUAL_WITHIN * max(abs(value), abs(other)):
            return f"{name} is {value:.6g} and {other:.6g}"
    sharded = {str(one.key) for one in joined.ranks[0].models if one.is_sharded}
    rows = {name: at for name, at in ours.rows.items() if name.partition("/")[0] not in sharded}
    found = next(
        iter(differing_ranks([joined.ranks[0], joined.ranks[rank]], [rows, theirs.rows])), ""
    )
    return f"the values of {shown(found)} differ" if found else ""


def _averages_statistics(joined: JoinedRuns, names: Sequence[str]) -> bool:
    """Return whether collectives outside of steps may make running statistics equal.

    Those of a few values combine metrics. DistributedDataParallel broadcasts after its first step.
    """
    known, weights = parameters(joined.ranks[0]), [f"{x.rpartition('.')[0]}.weight" for x in names]
    least = min(
        (BYTES_PER_VALUE * numel(known[one].shape) for one in weights if one in known), default=0
    )
    return any(
        one.phase is Phase.EVALUATION or (one.kind.startswith("broadcast") and one.step > 1)
        for one in joined.ranks[0].collectives
        if not one.is_in_backward and one.kind != "barrier" and one.nbytes >= least
    )


# Gradients that are not exchanged, or only those of one rank.


def not_exchanged(joined: JoinedRuns) -> Iterator[Finding]:
    """Find steps that use a rank's own gradient, for all parameters or for some."""
    own = [one for one in joined.exchanges if one.kind is Kind.OWN and not one.are_equal()]
    if own and _averages_parameters(joined, own):
        joined.averages_parameters = True
        joined.notes.append(
            "the ranks train with their own gradients, and average their parameters between some "
            "steps (local SGD): gradients and parameters of the steps between are not compared"
        )
        return
    if own:
        yield _all_parameters(joined, own)
    for one in joined.exchanges:
        names = [name for name in one.own if not _is_expert(joined, one, name)]
        if names:
            yield _some_parameters(joined, one, names)


def _averages_parameters(joined: JoinedRuns, own: list[Exchange]) -> bool:
    """Return whether parameters were different after one step, and equal before a later one.

    Not if all ranks take those of one rank.
    """
    after = {step.key: step for step in joined.steps}
    differed = False
    for one in own:
        step, next_step = one.step, after.get((one.step.optimizer, one.step.index + 1))
        if differed and _are_equal(step, before=True):
            return True
        if not _are_equal(step, before=False):
            differed = True
            if next_step is not None and _are_equal(next_step, before=True):
                taken = next_step.steps[0].before
                pairs = zip(step.ranks, step.steps, strict=True)
                return all(
                    differing_ranks([f, joined.ranks[0]], [x.parameters, taken]) for f, x in pairs
                )
    return False


def _are_equal(step: JointStep, before: bool) -> bool:
    """Return whether parameters are equal on all ranks, before or after a step."""
    rows = [one.before if before else one.parameters for one in step.steps]
    return bool(rows[0]) and not differing_ranks(step.ranks, rows)


def _is_expert(joined: JoinedRuns, one: Exchange, name: str) -> bool:
    """Return whether a parameter is left out of the exchange on purpose."""
    for model in joined.ranks[0].models:
        if shown(name) in model.ignored:
            return True
    if not joined.has_all_to_all:
        return False
    rows = [{n: at for n, at in x.parameters.items() if n == name} for x in one.step.steps]
    return bool(differing_ranks(one.step.ranks, rows))


def _all_parameters(joined: JoinedRuns, own: list[Exchange]) -> Finding:
    first, of = own[0], len(joined.exchanges)
    often = "each step" if len(own) == of else f"{len(own)} of {of} steps"
    text = (
        f"In {often}, the optimizer uses the gradient of its rank alone, for all parameters: the "
        "samples of the other ranks do not contribute to it."
    )
    lines, remedy = _why_all(joined, first)
    if lines and remedy:
        text += f" {remedy[0].upper()}{remedy[1:]}."
    found = first.step
    changed = [line for one in own[1:2] for facts in one.step.steps for line in facts.value_lines]
    return Finding(
        MISTAKES["gradients-not-exchanged"],
        [*changed, *lines, *found.lines],
        text,
        step=found.index + 1,
        values={"steps": len(own), "of_steps": of, "parameters": len(found.names)},
        remedy=_HOW.get(remedy, ""),
    )


_NO_SYNC = "the last backward of the step runs in no_sync"
_OUTSIDE = "the model is called without its wrapper"
_LATE = "a collective runs, but not between the backward and the step"
_NONE = "no collective runs between the backward and the step"
_FROZEN = "no gradient was required when the model was wrapped"
_HOW = {
    _NO_SYNC: "leave no_sync before the last forward and backward of each step",
    _OUTSIDE: "call the wrapper, not the module inside it",
    _LATE: "exchange the gradients after the last backward and before the optimizer's step",
    _NONE: "wrap the model in DistributedDataParallel, or all-reduce the gradients before the step",
    _FROZEN: "unfreeze parameters before the model is wrapped, or wrap it again",
}


def _why_all(joined: JoinedRuns, one: Exchange) -> tuple[list[str], str]:
    """Return the lines to look at and what is wrong there, for a step without any exchange."""
    backward = one.step.backwards[0][-1]
    model = joined.model(backward.model)
    wrapped = [m for m in joined.ranks[0].models if m.wrapper]
    models = [model] if model is not None else wrapped
    no_sync = [line for m in models for line in m.no_sync_lines]
    if not backward.is_syncing and no_sync:
        return [*no_sync, backward.line], _NO_SYNC
    outside = [line for m in wrapped for line in m.outside_forwards]
    if outside:
        return outside, _OUTSIDE
    if lines := joined.gradient_lines():
        return [*lines, one.step.steps[0].line], _LATE
    return [one.step.steps[0].line, *(m.line for m in models)], _NONE


def _some_parameters(joined: JoinedRuns, one: Exchange, names: list[str]) -> Finding:
    step = one.step
    exchanged = len(step.names) - len(names)
    what = listed([shown(name) for name in names])
    verb = "is" if len(names) == 1 else "are"
    text = (
        f"In step {step.index + 1}, the gradients of {what} {verb} those of each rank alone; those "
        f"of {exchanged} other parameters are exchanged."
    )
    lines, remedy = [], ""
    bare = {shown(name) for name in names}
    for model in joined.ranks[0].models:
        frozen = [p for p in model.parameters if p.name in bare and not p.requires_grad]
        if frozen and model.wrapper:
            lines += [model.line]
            remedy = _FROZEN
        elif any(p.name in bare for p in model.parameters):
            lines += model.outside_forwards
            lines += [] if model.wrapper else [*joined.gradient_lines(), model.line]
    if remedy:
        text += f" {_FROZEN[0].upper()}{_FROZEN[1:]}."
    elif any(model.outside_forwards for model in joined.ranks[0].models):
        text += " They are used outside of the wrapped module."
        remedy = _OUTSIDE
    return Finding(
        MISTAKES["gradients-not-exchanged"],
        [*lines, *joined.gradient_lines(), *step.lines],
        text,
        step=step.index + 1,
        layer=shown(names[0]),
        values={"parameters": len(names), "exchanged": exchanged},
        remedy=_HOW.get(remedy, ""),
    )
