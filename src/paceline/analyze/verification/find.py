"""All rules of ``paceline verify``, what they leave to say, and what was compared."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ...observe.facts.models import FLAT
from ...observe.facts.samples import BatchFacts
from ...plurals import counted
from .exchange import Kind
from .joined_runs import JoinedRuns
from .mistakes import Finding, Mistake, Nature
from .passes import Stream
from .relations import EPSILONS, MAX_ROUNDINGS, distance, median
from .replayed_steps import NOT_COMPARED, significant
from .rules import gradients, printed, random_numbers, replicas, resumes, samples, schedules
from .runs_facts import VerifyRuns

Rule = Callable[[JoinedRuns], Iterator[Finding]]

MISTAKES: dict[str, Mistake] = {
    **replicas.MISTAKES,
    **gradients.MISTAKES,
    **samples.MISTAKES,
    **random_numbers.MISTAKES,
    **schedules.MISTAKES,
    **printed.MISTAKES,
    **resumes.MISTAKES,
}
# In the order of their consequences: a mistake comes before those that follow from it.
RULES: tuple[Rule, ...] = (
    replicas.start_different,
    replicas.not_exchanged,
    samples.same_samples,
    samples.without_loader,
    random_numbers.different_split,
    random_numbers.different_data,
    samples.repeated_or_missing,
    samples.epoch_not_set,
    samples.same_order,
    samples.kept_batches,
    gradients.exchanged_weight,
    gradients.accumulation,
    gradients.uneven,
    gradients.clipped_before_exchange,
    schedules.rates_differ,
    replicas.skipped_steps,
    replicas.diverge,
    gradients.differs,
    gradients.part_loss,
    random_numbers.same_on_ranks,
    random_numbers.same_in_workers,
    schedules.scaling,
    schedules.schedule_length,
    replicas.buffers_differ,
    replicas.differ,
    samples.coverage,
    printed.logged_metric_of_one_rank,
    printed.of_one_rank,
    printed.differ,
    resumes.written_by_all,
    resumes.resumed_fails,
    resumes.resumed_differs,
    resumes.resumed_samples,
    gradients.batch_norm,
    printed.loss_of_one_rank,
)


SEVERAL = {samples.repeated_or_missing, samples.coverage, replicas.differ}  # find several things
# They compare ranks that have copies of one model and train different samples.
OF_COPIES = {
    *(replicas.start_different, replicas.skipped_steps, replicas.diverge),
    *(samples.same_samples, samples.repeated_or_missing, samples.without_loader),
    *(random_numbers.different_data, random_numbers.same_on_ranks),
    *(replicas.buffers_differ, replicas.differ),
}
COMPENSATED = (
    "The learning rate makes up for it. Does it depend on the number of ranks only? If it depends "
    "on the global batch size, it does not."
)


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


def _findings(rule: Rule, joined: JoinedRuns) -> Iterator[Finding]:
    """Yield what a rule finds: the first occurrence."""
    has_copies = joined.size > 1 and not joined.is_model_parallel
    if has_copies or rule not in OF_COPIES:
        yield from islice(rule(joined), None if rule in SEVERAL else 1)


def judge(runs: VerifyRuns, accepted: Collection[str] = ()) -> tuple[list[Finding], Compared]:
    """Return the measured differences, the first one first, then the questions; what was compared.

    A rule that fails on facts that it does not expect is noted, and the others still answer.

    accepted: Names in ``MEANT`` of differences that are meant.
    """
    joined = JoinedRuns(runs)
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += _findings(rule, joined)
        except Exception as error:
            name = rule.__name__.replace("_", " ")
            joined.notes.append(f"the rule {name!r} failed ({type(error).__name__}: {error})")
    found = [
        replace(one, is_accepted=True) if one.meant in accepted else one
        for one in _judged(joined, found)
    ]
    meant = [one for one in joined.comparison.meant if one not in accepted]
    return _ordered(found), compared(joined, meant)


def _judged(joined: JoinedRuns, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, those about gradients as the comparison with one process judges them.

    A rule names a difference that was measured, and no other one.
    """
    difference = joined.difference
    steps = {step.index + 1 for step in joined.replayed}
    for one in found:
        if not one.mistake.is_gradient or one.step not in steps or one.difference is not None:
            yield one
        elif gradients.is_compensated(joined):
            yield replace(one, text=f"{one.text} {COMPENSATED}", nature=Nature.QUESTION)
        elif difference is not None and difference.number <= one.step:
            text = f"{one.text} {difference.sentence}."
            yield replace(one, text=text, nature=Nature.MEASURED, difference=difference)


def _ordered(found: Iterable[Finding]) -> list[Finding]:
    """Return the findings without consequences: what differs first comes first, then questions."""

    def place(one: Finding) -> tuple[bool, bool, int]:
        return one.is_question, one.mistake.is_late, one.step or 0

    return sorted(without_consequences(list(found)), key=place)


def without_consequences(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no other one explains, each mistake once per line."""
    kept: list[Finding] = []
    for one in found:
        explained = any(
            one.mistake.id in other.mistake.explains
            for other in found
            if not other.is_question or one.is_question
        )
        again = any(
            other.mistake.id == one.mistake.id
            and (not one.lines or bool(set(other.lines[:1]) & set(one.lines)))
            for other in kept
        )
        if not explained and not again:
            kept.append(one)
    return kept


def compared(joined: JoinedRuns, meant: Sequence[str] = ()) -> Compared:
    """Return what the rules had to compare."""
    related = [one for one in joined.exchanges if one.kind is Kind.UNIFORM]
    found = Compared(joined.size, steps=len(joined.steps), related=len(related), meant=list(meant))
    found.parameters = max((len(step.names) for step in joined.steps), default=0)
    found.epochs = max((len(one.passes) for one in joined.training), default=0)
    found.samples = sum(batch.used for batch in _batches(joined.training))
    found.evaluated = sum(batch.samples for batch in _batches(joined.evaluation))
    found.largest_residual = max((one.residual for one in related), default=0.0)
    _compare_replay(joined, found)
    found.no_verdict = _no_verdict(joined, found)
    found.notes = _notes(joined, found)
    if not found.replayed:
        known = [one for one in joined.runs.notes if one.startswith(NOT_COMPARED)]
        reason = known[0].partition(": ")[2] if known else joined.replay.obstacle
        found.not_replayed = (
            joined.comparison.reason or reason or "its samples or parameters are others"
        )
    return found


def _batches(streams: Sequence[Stream]) -> Iterator[BatchFacts]:
    passes = (one for stream in streams for joint in stream.passes for one in joint.ranks.values())
    return (batch for one in passes for batch in one.batches)


def _no_verdict(joined: JoinedRuns, found: Compared) -> str:
    """Return why nothing could be compared; "" if something was."""
    if joined.size < 2:
        return "one rank was observed: there is no other to compare it with."
    if not found.steps:
        return "no optimizer step of all ranks was seen."
    if found.parameters:
        return ""
    if any(model.wrapper == FLAT for model in joined.ranks[0].models):
        return f"{FLAT} flattens the parameters: gradients and parameters were not compared."
    loose = [
        one.line
        for one in joined.ranks[0].optimizers
        if any(name.startswith("?") for group in one.parameters for name in group)
    ]
    if loose:
        return (
            f"the optimizer of {loose[0]} holds parameters of no model, such as those from before "
            "the model was wrapped. HINT: make the optimizer after the wrapper."
        )
    return f"the gradients of {counted(found.steps, 'step')} are not known."


def _compare_replay(joined: JoinedRuns, found: Compared) -> None:
    found.replayed_by = joined.replay.name
    found.replayed = len(joined.replayed)
    for step in joined.replayed:
        noise = joined.replay.noise(step).values()
        if noise and found.noise is None:
            found.noise = median(noise)
        if not found.differences:
            ours, limits = step.unclipped(0), joined.replay.tolerances(step)
            theirs = joined.replay.gradients(step) or {}
            found.differences = {
                name: (distance(ours[name], theirs[name]), limits.get(name, 0.0))
                for name in significant(ours, theirs)
            }


def _notes(joined: JoinedRuns, found: Compared) -> list[str]:
    notes = [*joined.runs.notes, *joined.notes]
    notes += dict.fromkeys(text for one in joined.ranks for text in one.unseen)
    if joined.size > 1 and not joined.steps:
        notes.append("no optimizer step of all ranks was seen")
    elif joined.size > 1 and not joined.exchanges:
        notes.append("the gradients before the exchange are not known: they were not compared")
    odd = [one for one in joined.exchanges if one.kind is Kind.OTHER]
    if odd:
        notes.append(
            f"in {len(odd)} of {len(joined.exchanges)} steps, the gradient is no sum of the ranks' "
            f"gradients (relative difference {max(one.residual for one in odd):.2g}): compression, "
            "or a change after the backward"
        )
    exact = MAX_ROUNDINGS * EPSILONS["float32"] * 10
    if found.largest_residual > exact and not odd:
        notes.append(
            f"the exchange rounds gradients: relative difference {found.largest_residual:.2g}"
        )
    if joined.replay.obstacle:
        notes.append(
            "the gradients of N ranks were not compared with those of one process one by one: "
            f"{joined.replay.obstacle}"
        )
    return notes
