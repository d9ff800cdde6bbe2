"""All rules of ``paceline verify``, in one table, and what they leave to say."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from .compared import Compared, compared
from .mistakes import Finding, Nature
from .rules import (
    checkpoints,
    logged_metrics,
    one_process,
    printed_losses,
    printed_values,
    random_numbers,
    replicas,
    resumes,
    schedules,
    states,
)
from .rules.samples import contents, different_data, epochs, validation
from .rules.step_gradients import clipping, not_exchanged, uneven_weights, weights
from .rules.step_gradients.weights import is_compensated
from .runs_facts import VerifyRuns
from .view import View

Rule = Callable[[View], Iterator[Finding]]

# In the order of their consequences: a mistake comes before those that follow from it.
RULES: tuple[Rule, ...] = (
    replicas.start_different,
    not_exchanged.not_exchanged,
    epochs.same_samples,
    contents.without_loader,
    random_numbers.different_split,
    different_data.different_data,
    epochs.repeated_or_missing,
    epochs.epoch_not_set,
    contents.same_order,
    contents.kept_batches,
    weights.exchanged_weight,
    weights.accumulation,
    uneven_weights.uneven,
    clipping.clipped_before_exchange,
    schedules.rates_differ,
    replicas.skipped_steps,
    replicas.diverge,
    one_process.differs,
    one_process.part_loss,
    random_numbers.same_on_ranks,
    random_numbers.same_in_workers,
    schedules.scaling,
    schedules.schedule_length,
    states.buffers_differ,
    states.differ,
    validation.coverage,
    logged_metrics.logged_metric_of_one_rank,
    printed_values.of_one_rank,
    printed_values.differ,
    checkpoints.written_by_all,
    resumes.resumed_fails,
    resumes.resumed_differs,
    resumes.resumed_samples,
    one_process.batch_norm,
    printed_losses.loss_of_one_rank,
)


SEVERAL = {epochs.repeated_or_missing, validation.coverage, states.differ}  # find several things
# They compare ranks that have copies of one model and train different samples.
OF_COPIES = {
    *(replicas.start_different, replicas.skipped_steps, replicas.diverge),
    *(epochs.same_samples, epochs.repeated_or_missing, contents.without_loader),
    *(different_data.different_data, random_numbers.same_on_ranks),
    *(states.buffers_differ, states.differ),
}


def find(runs: VerifyRuns) -> list[Finding]:
    """Return the measured differences, the first one first, then the questions."""
    view = View(runs)
    return _ordered(_judged(view, [one for rule in RULES for one in _findings(rule, view)]))


def _findings(rule: Rule, view: View) -> Iterator[Finding]:
    """Yield what a rule finds: the first occurrence."""
    has_copies = view.size > 1 and not view.is_model_parallel
    if has_copies or rule not in OF_COPIES:
        yield from islice(rule(view), None if rule in SEVERAL else 1)


def judge(runs: VerifyRuns, accepted: Collection[str] = ()) -> tuple[list[Finding], Compared]:
    """Return the findings, and what was compared.

    A rule that fails on facts that it does not expect is noted, and the others still answer.

    accepted: Names in ``MEANT`` of differences that are meant.
    """
    view = View(runs)
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += _findings(rule, view)
        except Exception as error:
            name = rule.__name__.replace("_", " ")
            view.notes.append(f"the rule {name!r} failed ({type(error).__name__}: {error})")
    found = [
        replace(one, is_accepted=True) if one.meant in accepted else one
        for one in _judged(view, found)
    ]
    meant = [one for one in view.comparison.meant if one not in accepted]
    return _ordered(found), compared(view, meant)


def _judged(view: View, found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, those about gradients as the comparison with one process judges them.

    A rule names a difference that was measured, and no other one.
    """
    difference = view.difference
    steps = {step.index + 1 for step in view.replayed}
    for one in found:
        if not one.mistake.is_gradient or one.step not in steps or one.difference is not None:
            yield one
        elif is_compensated(view):
            yield replace(one, nature=Nature.QUESTION)
        elif difference is not None and difference.index + 1 <= one.step:
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
