"""What happens seldom in a training, from a long run of the unchanged script.

The experiments measure a few steps. Validation and checkpoints are rarely among them, or happen to
be in one experiment and not in the other. Their share of the training is therefore taken from the
survey: all recorded steps of the first run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...record.ring.states import State
from ..figures.losses import Loss
from ..figures.report import analyse_with_window
from ..records.load_run import Run
from .rungs import RungResult, measure_rung

RARE = ("validation", "checkpoint")  # kinds of losses that are taken from the survey
MAX_SHARE_OF_STEPS = 0.5  # a loss in more steps is not seldom


@dataclass(frozen=True)
class RareEvent:
    """Something that the survey has seen in some of its steps.

    Attributes:
        kind: "validation", "checkpoint", or another kind of loss.
        rank: The rank with the largest loss, or that the others wait for.
        share: Of all ranks' time.
        count: Number of steps that have it.
        period: Steps between two occurrences, if they are regular.
        at_epoch_ends: Whether it comes at the end of each epoch.
    """

    kind: str
    rank: int | None
    share: float
    count: int
    period: int | None
    at_epoch_ends: bool


@dataclass(frozen=True)
class Survey:
    """The shares of what happens seldom.

    Attributes:
        steps: Number of steps that were evaluated.
        seconds: Their duration.
        epoch_batches: Batches of an epoch; None if not known.
        missing_s: Time that is missing to the end of the first epoch; 0 if it was reached.
        validation_s, checkpoint_s: By rank, seconds per step.
        events: What was seen, largest share first.
        losses: Losses of the kinds in RARE.
    """

    steps: int
    seconds: float
    epoch_batches: int | None
    missing_s: float
    validation_s: list[float]
    checkpoint_s: list[float]
    events: list[RareEvent] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)


def survey(run: Run, warm: int) -> Survey | None:
    """Evaluate all steps of a run after the warm-up; None if there are too few, or not all."""
    steps = min((record.count(State.STEP) for record in run.records), default=0) - warm
    if steps < 2 or run.missing or any(record.lost for record in run.records):
        return None
    lengths = [record.meta.get("rung", {}).get("epoch_batches") for record in run.records]
    epoch = max((one for one in lengths if one), default=None)
    report = analyse_with_window(run, (warm, warm + steps)).report
    together: dict[str, RareEvent] = {}
    for one in _events(report.losses):  # what a rank does, and the others' waiting for it
        before = together.get(one.kind)
        together[one.kind] = replace(before, share=before.share + one.share) if before else one
    events = sorted(together.values(), key=lambda one: one.share, reverse=True)
    taken = measure_rung(run, warm, steps)
    return Survey(
        steps=steps,
        seconds=taken.step_s * steps,
        epoch_batches=epoch,
        missing_s=max((epoch or 0) - warm - steps, 0) * taken.step_s,
        validation_s=taken.validation_s,
        checkpoint_s=taken.checkpoint_s,
        events=events,
        losses=[loss for loss in report.losses if is_rare(loss)],
    )


def is_rare(loss: Loss) -> bool:
    """Return whether a loss is of a kind that is taken from the survey."""
    return loss.kind in RARE or (loss.kind == "wait" and loss.doing in RARE)


def _events(losses: Iterable[Loss]) -> Iterable[RareEvent]:
    for loss in losses:
        at = loss.occurs
        kind = loss.doing if loss.kind == "wait" else loss.kind
        if at is None or kind is None or at.count > MAX_SHARE_OF_STEPS * at.of:
            continue
        if is_rare(loss) or at.at_epoch_ends or at.period is not None:
            yield RareEvent(kind, loss.rank, loss.share, at.count, at.period, at.at_epoch_ends)


def pooled(results: list[RungResult]) -> Survey | None:
    """Return a survey of the steps of all experiments with all ranks, for want of a longer one."""
    if not results:
        return None
    count = len(results)

    def mean(name: str) -> list[float]:
        each = zip(*(getattr(result, name) for result in results), strict=True)
        return [sum(of_rank) / count for of_rank in each]

    return Survey(0, 0.0, None, 0.0, mean("validation_s"), mean("checkpoint_s"))


def book_rare(results: list[RungResult], seen: Survey) -> list[RungResult]:
    """Return results of all ranks with validation and checkpoints as often as in the survey."""
    return [
        _booked(result, seen) if result.ranks == len(seen.validation_s) else result
        for result in results
    ]


def _booked(result: RungResult, seen: Survey) -> RungResult:
    parts = (result.training_s, seen.validation_s, seen.checkpoint_s)
    step_s = max(map(sum, zip(*parts, strict=True)))
    return replace(
        result,
        together=result.together * result.step_s / step_s,
        step_s=step_s,
        validation_s=seen.validation_s,
        checkpoint_s=seen.checkpoint_s,
    )
