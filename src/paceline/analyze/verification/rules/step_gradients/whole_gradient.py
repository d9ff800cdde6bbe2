"""The gradient of N ranks beside that of one process with the same samples."""

from collections.abc import Iterator

from ...exchange import Kind
from ...mistakes import MISTAKES, Certainty, Finding
from ...relations import distance
from ...replay import significant
from ...steps import JointStep, shown
from ...view import View, unique

VISIBLE = 1e-5  # relative difference below which no training notices


def differs(view: View) -> Iterator[Finding]:
    """Find the first step whose gradient is another than that of one process."""
    floors = {
        (one.step.optimizer, one.step.index): one.residual
        for one in view.exchanges
        if one.kind is not Kind.OTHER
    }
    for step in view.steps:
        floor = floors.get((step.optimizer, step.index), 0.0)
        off = _differences(view, step, floor)
        if not off:
            continue
        layer = max(off, key=lambda name: off[name])
        related = step_is_mean(view, step)
        text = (
            f"In step {step.index + 1}, the gradient of {shown(layer)} differs by "
            f"{100 * off[layer]:.2g} % from that of {view.replay.name} with the same samples; so "
            f"do those of {len(off) - 1} other parameters."
        )
        if related:
            text += (
                " It is the mean of the ranks' gradients, so the loss of a rank is not the loss "
                "of its samples alone, or depends on the rank or the batch. If it compares the "
                "samples of a batch with each other, this is expected."
            )
        yield Finding(
            MISTAKES["gradients-differ"],
            unique(step.lines),
            text,
            step=step.index + 1,
            layer=shown(layer),
            values={"difference": off[layer], "parameters": len(off)},
            certainty=Certainty.QUESTION if related else None,
        )
        return


def _differences(view: View, step: JointStep, floor: float) -> dict[str, float]:
    """Return the relative differences that exceed the noise, by parameter."""
    theirs = view.replay.gradients(step)
    if theirs is None:
        return {}
    ours = step.unclipped(0)
    tolerances = view.replay.tolerances(step, floor)
    names = [name for name in significant(ours, theirs) if name in tolerances]
    found = {name: distance(ours[name], theirs[name]) for name in names}
    return {name: x for name, x in found.items() if x > max(tolerances[name], VISIBLE)}


def step_is_mean(view: View, step: JointStep) -> bool:
    """Return whether the gradient of a step is the mean of those of the ranks."""
    key = (step.optimizer, step.index)
    found = [one for one in view.exchanges if (one.step.optimizer, one.step.index) == key]
    return any(
        one.kind is Kind.UNIFORM and abs(one.multiple - 1) < 0.01 and not one.own for one in found
    )
