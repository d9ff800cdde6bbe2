"""What a verification compared, with which tolerance, and what it could not see."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...plurals import counted
from ...record.training.facts.models import FLAT
from .exchange import Kind
from .relations import EPSILONS, ROUNDINGS, distance
from .replay import NOT_COMPARED, significant
from .view import View


@dataclass
class Compared:
    """What was compared.

    Attributes:
        ranks: Number of ranks.
        steps: Optimizer steps of all ranks that were compared.
        related: Steps whose gradient is a known multiple of the mean of the ranks' gradients.
        parameters: Number of parameters (tensors) with gradients.
        epochs: Passes over training data.
        samples: Samples that the ranks trained.
        evaluated: Samples of the validation passes.
        replayed: Steps that were compared with a replay.
        replayed_by: What replayed them: "one process", or "2 ranks" where one can't hold the model.
        largest_residual: Largest relative difference from the relation of a step.
        noise: Median relative rounding noise of a gradient, measured by permuting the samples of a
            step; None if it was not measured.
        differences: By parameter, the relative difference from one process in the first compared
            step, and the tolerance.
        meant: Names of usual differences that one process has with the ranks' batches, too.
        no_verdict: Why nothing could be compared, as a sentence; "" if something was.
        not_replayed: Why no step was compared with one process; "" if one was.
        notes: What could not be seen, each with its reason; sentences without full stop.
    """

    ranks: int
    steps: int = 0
    related: int = 0
    parameters: int = 0
    epochs: int = 0
    samples: int = 0
    evaluated: int = 0
    replayed: int = 0
    replayed_by: str = "one process"
    largest_residual: float = 0.0
    noise: float | None = None
    differences: dict[str, tuple[float, float]] = field(default_factory=dict)
    meant: list[str] = field(default_factory=list)
    no_verdict: str = ""
    not_replayed: str = ""
    notes: list[str] = field(default_factory=list)


def compared(view: View, meant: Sequence[str] = ()) -> Compared:
    """Return what the rules had to compare."""
    related = [one for one in view.exchanges if one.kind is Kind.UNIFORM]
    found = Compared(view.size, steps=len(view.steps), related=len(related), meant=list(meant))
    found.parameters = max((len(step.names) for step in view.steps), default=0)
    found.epochs = max((len(one.passes) for one in view.training), default=0)
    found.samples = sum(
        batch.used
        for stream in view.training
        for one in stream.passes
        for made in one.ranks.values()
        for batch in made.batches
    )
    found.evaluated = sum(
        batch.samples
        for stream in view.evaluation
        for one in stream.passes
        for made in one.ranks.values()
        for batch in made.batches
    )
    found.largest_residual = max((one.residual for one in related), default=0.0)
    _compare_replay(view, found)
    found.no_verdict = _no_verdict(view, found)
    found.notes = _notes(view, found)
    if not found.replayed:
        known = [one for one in view.runs.notes if one.startswith(NOT_COMPARED)]
        reason = known[0].partition(": ")[2] if known else view.replay.obstacle
        found.not_replayed = (
            view.comparison.reason or reason or "its samples or parameters are others"
        )
    return found


def _no_verdict(view: View, found: Compared) -> str:
    """Return why nothing could be compared; "" if something was."""
    if view.size < 2:
        return "one rank was observed: there is no other to compare it with."
    if not found.steps:
        return "no optimizer step of all ranks was seen."
    if found.parameters:
        return ""
    if any(model.wrapper == FLAT for model in view.ranks[0].models):
        return f"{FLAT} flattens the parameters: gradients and parameters were not compared."
    loose = [
        one.line
        for one in view.ranks[0].optimizers
        if any(name.startswith("?") for group in one.parameters for name in group)
    ]
    if loose:
        return (
            f"the optimizer of {loose[0]} holds parameters of no model, such as those from before "
            "the model was wrapped. HINT: make the optimizer after the wrapper."
        )
    return f"the gradients of {counted(found.steps, 'step')} are not known."


def _compare_replay(view: View, found: Compared) -> None:
    found.replayed_by = view.replay.name
    found.replayed = len(view.replayed)
    for step in view.replayed:
        noise = sorted(view.replay.noise(step).values())
        if noise and found.noise is None:
            found.noise = noise[len(noise) // 2]
        if not found.differences:
            ours, limits = step.unclipped(0), view.replay.tolerances(step)
            theirs = view.replay.gradients(step) or {}
            found.differences = {
                name: (distance(ours[name], theirs[name]), limits.get(name, 0.0))
                for name in significant(ours, theirs)
            }


def _notes(view: View, found: Compared) -> list[str]:
    notes = [*view.runs.notes, *view.notes]
    notes += dict.fromkeys(text for one in view.ranks for text in one.unseen)
    if view.size > 1 and not view.steps:
        notes.append("no optimizer step of all ranks was seen")
    elif view.size > 1 and not view.exchanges:
        notes.append("the gradients before the exchange are not known: they were not compared")
    odd = [one for one in view.exchanges if one.kind is Kind.OTHER]
    if odd:
        notes.append(
            f"in {len(odd)} of {len(view.exchanges)} steps, the gradient is no sum of the ranks' "
            f"gradients (relative difference {max(one.residual for one in odd):.2g}): compression, "
            "or a change after the backward"
        )
    exact = ROUNDINGS * EPSILONS["float32"] * 10
    if found.largest_residual > exact and not odd:
        notes.append(
            f"the exchange rounds gradients: relative difference {found.largest_residual:.2g}"
        )
    if view.replay.obstacle:
        notes.append(
            "the gradients of N ranks were not compared with those of one process one by one: "
            f"{view.replay.obstacle}"
        )
    return notes
