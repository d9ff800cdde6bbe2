"""Gradients that are not exchanged, or only those of one rank."""

from collections.abc import Iterator

from ..exchange import Exchange, Kind
from ..joined_runs import JoinedRuns, listed
from ..mistakes import Finding, Mistake, by_id, ids
from ..relations import EQUAL_WITHIN, apart, distance
from ..steps import JointStep, shown

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
)


def not_exchanged(joined: JoinedRuns) -> Iterator[Finding]:
    """Find steps that use a rank's own gradient, for all parameters or for some."""
    own = [one for one in joined.exchanges if one.kind is Kind.OWN and _differ(one)]
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


def _differ(one: Exchange) -> bool:
    """Return whether the ranks' optimizers use different gradients."""
    used = [one.step.used(rank) for rank in range(one.step.size)]
    return any(
        distance(used[0][name], other[name]) > EQUAL_WITHIN
        for other in used
        for name in one.step.names
    )


def _averages_parameters(joined: JoinedRuns, own: list[Exchange]) -> bool:
    """Return whether parameters were different after one step, and equal before a later one.

    Not if all ranks take those of one rank.
    """
    after = {(step.optimizer, step.index): step for step in joined.steps}
    differed = False
    for one in own:
        step, next_step = one.step, after.get((one.step.optimizer, one.step.index + 1))
        if differed and _equal(step, before=True):
            return True
        if not _equal(step, before=False):
            differed = True
            if next_step is not None and _equal(next_step, before=True):
                taken = next_step.steps[0].before
                pairs = zip(step.ranks, step.steps, strict=True)
                return all(apart([f, joined.ranks[0]], [x.parameters, taken]) for f, x in pairs)
    return False


def _equal(step: JointStep, before: bool) -> bool:
    """Return whether parameters are equal on all ranks, before or after a step."""
    rows = [one.before if before else one.parameters for one in step.steps]
    return bool(rows[0]) and not apart(step.ranks, rows)


def _is_expert(joined: JoinedRuns, one: Exchange, name: str) -> bool:
    """Return whether a parameter is left out of the exchange on purpose."""
    for model in joined.ranks[0].models:
        if shown(name) in model.ignored:
            return True
    if not joined.has_all_to_all:
        return False
    rows = [{n: at for n, at in x.parameters.items() if n == name} for x in one.step.steps]
    return bool(apart(one.step.ranks, rows))


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
