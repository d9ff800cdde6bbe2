"""All rules of ``paceline verify``, in one table, and what they leave to say."""

from collections.abc import Callable, Iterator, Sequence

from .compared import Compared, compared
from .mistakes import Finding
from .rules import (
    checkpoints,
    logged_metrics,
    outputs,
    printed_losses,
    random_numbers,
    replicas,
    resumes,
    schedule_epochs,
    schedules,
    states,
)
from .rules.samples import contents, coverage, different_data, epochs, validation
from .rules.step_gradients import clipping, not_exchanged, uneven_weights, weights, whole_gradient
from .runs_facts import VerifyRuns
from .view import View

Rule = Callable[[View], Iterator[Finding]]

# In the order of their consequences: a mistake comes before those that follow from it.
RULES: tuple[Rule, ...] = (
    replicas.start_different,
    not_exchanged.not_exchanged,
    not_exchanged.one_rank_only,
    not_exchanged.returned,
    epochs.same_samples,
    contents.same_without_loader,
    random_numbers.different_split,
    different_data.different_data,
    epochs.repeated_or_missing,
    coverage.never_trained,
    epochs.epoch_not_set,
    contents.same_order,
    contents.kept_batches,
    weights.exchanged_weight,
    weights.accumulation,
    uneven_weights.uneven,
    clipping.clipped_before_exchange,
    clipping.clipped_by_part,
    schedules.rates_differ,
    replicas.skipped_steps,
    replicas.diverge,
    whole_gradient.differs,
    random_numbers.same_on_ranks,
    random_numbers.same_in_workers,
    schedules.scaling,
    schedules.schedule_length,
    schedule_epochs.schedule_of_training,
    schedules.schedule_unit,
    states.drawn_buffers,
    states.batch_norm_differs,
    states.evaluated_statistics,
    states.differ,
    validation.coverage,
    coverage.evaluated,
    logged_metrics.logged_metric_of_one_rank,
    outputs.metric_of_one_rank,
    checkpoints.written_by_all,
    checkpoints.incomplete,
    resumes.resumed_fails,
    resumes.resumed_differs,
    resumes.resumed_samples,
    states.batch_norm_of_one_rank,
    printed_losses.loss_of_one_rank,
)


def find(runs: VerifyRuns) -> list[Finding]:
    """Return the mistakes, those with the most consequences first, then the questions."""
    view = View(runs)
    return _ordered([one for rule in RULES for one in rule(view)])


def judge(runs: VerifyRuns) -> tuple[list[Finding], Compared]:
    """Return the findings, and what was compared.

    A rule that fails on facts that it does not expect is noted, and the others still answer.
    """
    view = View(runs)
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule(view)
        except Exception as error:
            name = rule.__name__.replace("_", " ")
            view.notes.append(f"the rule {name!r} failed ({type(error).__name__}: {error})")
    return _ordered(found), compared(view)


def _ordered(found: Sequence[Finding]) -> list[Finding]:
    return sorted(without_consequences(found), key=lambda one: one.is_question)


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
