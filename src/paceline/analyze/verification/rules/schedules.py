"""Learning rates and their schedules.

Ranks with different learning rates differ. What is another on N ranks than on one is the user's
choice, and asked with both values.
"""

from collections.abc import Iterator
from math import isclose

import numpy as np
from numpy.typing import NDArray

from ....observe.facts.ranks import RankFacts
from ....observe.facts.samples import Phase
from ....observe.facts.steps import OptimizerFacts, ScheduleFacts
from ..joined_runs import JoinedRuns
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..relations import EQUAL_WITHIN, percent
from ..steps import JointStep, joint_steps

EQUAL_LENGTHS = 0.1  # relative difference of equal lengths: incomplete batches and steps
MIN_RATIO = 1.5  # of rates, or of lengths, that are observed in few steps, and differ
MIN_STEPS = 0.5  # in which a rate changes, from which on this number is known

MISTAKES = by_id(
    Mistake(
        "learning-rate-not-scaled",
        "The learning rate is that of one rank",
        "a question: the learning rates on N ranks and on one",
        "scale it with the global batch size if that is wanted",
        Nature.QUESTION,
    ),
    Mistake(
        "learning-rate-scaled-twice",
        "The learning rate is scaled twice",
        "a question: the learning rates on N ranks and on one",
        "multiply it by the number of ranks at one place",
        explains=("learning-rate-not-scaled",),
        nature=Nature.QUESTION,
    ),
    Mistake(
        "learning-rates-differ",
        "Ranks have different learning rates",
        "the learning rates of the ranks in each step",
        "compute the learning rate from values that are equal on all ranks",
        explains=ids(
            "replicas-diverge state-differs learning-rate-not-scaled learning-rate-scaled-twice"
        ),
    ),
    Mistake(
        "schedule-counts-other-steps",
        "The learning-rate schedule has another length than the training",
        "a question: the length of the schedule in epochs, or the epochs in which learning rates "
        "change as much, on N ranks and on one",
        "compute its length from the number of steps on N ranks: len(loader) after the split",
        nature=Nature.QUESTION,
    ),
)


def rates_differ(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks with different learning rates in the same step."""
    for step in joined.steps:
        rates = [one.learning_rates for one in step.steps]
        for rank in range(1, joined.size):
            for group, (ours, theirs) in enumerate(zip(rates[0], rates[rank], strict=False)):
                if isclose(ours, theirs, rel_tol=EQUAL_WITHIN, abs_tol=EQUAL_WITHIN**2):
                    continue
                where = f" (parameter group {group})" if len(rates[0]) > 1 else ""
                yield Finding(
                    MISTAKES["learning-rates-differ"],
                    _lines(joined, step),
                    f"In step {step.index + 1}, the learning rate is {ours:.6g} on rank 0 and "
                    f"{theirs:.6g} on rank {rank}{where}.",
                    ranks=[rank],
                    step=step.index + 1,
                    values={"rate_0": ours, f"rate_{rank}": theirs},
                )


def _lines(joined: JoinedRuns, step: JointStep) -> list[str]:
    """Return lines that change the rates of a step, those of some ranks first.

    The optimizer comes first if the ranks made it with different rates.
    """
    made = [x for f in joined.ranks for x in f.optimizers if x.key == step.optimizer]
    every = dict.fromkeys(line for one in made for line in one.rate_lines)
    lines = sorted(every, key=lambda line: all(line in one.rate_lines for one in made))
    lines += [line for one in joined.ranks[0].schedules for line in (*one.step_lines[:1], one.line)]
    own = [one.line for one in made[:1]]
    if any(one.initial_rates != made[0].initial_rates for one in made):
        return [*own, *lines, step.steps[0].line]
    return [*lines, *own, step.steps[0].line]


def scaling(joined: JoinedRuns) -> Iterator[Finding]:
    """Ask about a learning rate that grows otherwise than the global batch."""
    single, n = joined.runs.single, joined.size
    growth = _growth(joined, single) if single is not None and n > 1 else None
    if single is None or growth is None:
        return
    for optimizer in joined.ranks[0].optimizers:
        pairs = [
            (of_ranks, alone)
            for of_ranks, alone in _rates(joined.ranks[0], single, optimizer.key)
            if min(of_ranks, alone) > 0
        ]
        if not pairs:
            continue
        of_ranks, alone = max(pairs, key=lambda pair: pair[0] / pair[1])
        more = f"{growth:.3g} times the global batch"
        schedules = [one for one in joined.ranks[0].schedules if one.optimizer == optimizer.key]
        may_scale_later = any(one.class_name == "LambdaLR" for one in schedules)
        if (
            isclose(of_ranks, alone, rel_tol=EQUAL_WITHIN)
            and growth > 1 + EQUAL_LENGTHS
            and not may_scale_later
        ):
            kind, text = "not-scaled", f"{of_ranks:.6g} on one rank and on {n}, with {more}: is "
            text += f"{of_ranks * growth:.6g} wanted?"
        elif of_ranks / alone > growth * (1 + EQUAL_LENGTHS):
            kind, text = "scaled-twice", f"{of_ranks:.6g} on {n} ranks and {alone:.6g} on one: "
            text += f"{of_ranks / alone:.3g} times as large, with {more}. Is this wanted?"
        else:
            continue
        yield Finding(
            MISTAKES[f"learning-rate-{kind}"],
            [*(s.line for s in schedules if s.peaks), optimizer.line, *(s.line for s in schedules)],
            f"The learning rate is {text}",
            values={"rate": of_ranks, "rate_of_one": alone, "growth": growth},
        )


def _rates(of_ranks: RankFacts, alone: RankFacts, key: int) -> Iterator[tuple[float, float]]:
    """Yield learning rates of an optimizer on N ranks, each with that of one rank.

    They are the largest ones of schedules that were made with them. Else they are those with which
    the optimizer was made, those of the first step, and larger ones of later steps: one rank has
    smaller ones both in the same step and at the same share of an epoch.
    """
    runs = (of_ranks, alone)
    peaks = [[x.peaks for x in one.schedules if x.optimizer == key and x.peaks] for one in runs]
    if all(peaks):
        for rows in zip(*peaks, strict=False):
            yield from zip(*rows, strict=False)
        return
    made = [next((x.initial_rates for x in one.optimizers if x.key == key), []) for one in runs]
    yield from zip(*made, strict=False)
    steps = [[x.learning_rates for x in one.steps if x.optimizer == key] for one in runs]
    epochs = [epoch_steps(one) for one in runs]
    pace = epochs[1] / epochs[0] if all(epochs) else 1.0
    for at, both in enumerate(zip(*steps, strict=False)):
        at_share = steps[1][min(round(at * pace), len(steps[1]) - 1)]
        for mine, same, later in zip(*both, at_share, strict=False):
            if at == 0 or mine > MIN_RATIO * max(same, later):
                yield mine, max(same, later)


def schedule_length(joined: JoinedRuns) -> Iterator[Finding]:
    """Ask about schedules that have another length in epochs on N ranks than on one."""
    single = joined.runs.single
    if single is None or joined.size < 2:
        return
    of_ranks, alone = epoch_steps(joined.ranks[0]), epoch_steps(single)
    if not of_ranks or not alone:
        return
    for schedule, other in zip(joined.ranks[0].schedules, single.schedules, strict=False):
        yield from _of_lengths(joined.size, schedule, other, of_ranks, alone)
    for optimizer in joined.ranks[0].optimizers:
        schedules = [x for x in joined.ranks[0].schedules if x.optimizer == optimizer.key]
        if not any(one.lengths for one in schedules):
            yield from _of_rates(joined, single, optimizer, schedules, of_ranks, alone)


def _of_lengths(
    n: int, schedule: ScheduleFacts, other: ScheduleFacts, of_ranks: float, alone: float
) -> Iterator[Finding]:
    """Compare the lengths with which a schedule was made. of_ranks, alone: Steps of an epoch."""
    calls, their_calls = calls_per_step(schedule), calls_per_step(other)
    if schedule.class_name != other.class_name or calls is None or their_calls is None:
        return
    pairs = [
        (name, *both)
        for name, lengths in schedule.lengths.items()
        for both in zip(lengths, other.lengths.get(name, []), strict=False)
    ]
    for name, length, their_length in pairs[::-1]:
        epochs, of_one = length / calls / of_ranks, their_length / their_calls / alone
        if of_one < 1 - EQUAL_LENGTHS or abs(epochs / of_one - 1) <= EQUAL_LENGTHS:
            continue  # shorter than an epoch: a warm-up with a number of steps
        yield Finding(
            MISTAKES["schedule-counts-other-steps"],
            [schedule.line, *schedule.step_lines[:1]],
            f"{schedule.class_name} has {name} = {length} on {n} ranks, which is "
            f"{epochs:.3g} epochs of {of_ranks:.0f} steps, and {their_length} on one, "
            f"which is {of_one:.3g} epochs of {alone:.0f} steps. Is the number of epochs "
            "another one on more ranks?",
            values={"length": length, "epochs": epochs, "epochs_of_one": of_one},
        )


def _of_rates(
    joined: JoinedRuns,
    single: RankFacts,
    optimizer: OptimizerFacts,
    schedules: list[ScheduleFacts],
    of_ranks: float,
    alone: float,
) -> Iterator[Finding]:
    """Compare the epochs in which the learning rates of functions of the step change as much.

    A warm-up with a number of steps is the same in these steps. of_ranks, alone: Steps of an epoch.
    """
    for group in range(len(optimizer.initial_rates)):
        changes = [_changes(one, optimizer.key, group) for one in (joined.ranks[0], single)]
        level = min((max(abs(each), default=0.0) for each in changes), default=0.0)
        is_rising = [bool(each.sum() > 0) for each in changes]
        if not level > EQUAL_WITHIN or len(set(is_rising)) > 1:
            continue
        taken = [float(np.interp(level, abs(each), np.arange(len(each)))) for each in changes]
        epochs = (taken[0] / of_ranks, taken[1] / alone)
        are_equal_steps = isclose(*taken, rel_tol=EQUAL_LENGTHS)
        ratio = max(epochs) / max(min(epochs), 1e-30)
        if min(taken) < MIN_STEPS or ratio < MIN_RATIO or (is_rising[0] and are_equal_steps):
            continue
        lines = [line for one in schedules for line in (one.line, *one.step_lines[:1])]
        yield Finding(
            MISTAKES["schedule-counts-other-steps"],
            [*lines, *optimizer.rate_lines, optimizer.line],
            f"The learning rate {'rises' if is_rising[0] else 'falls'} by {percent(level)} of its "
            f"initial value within {taken[0]:.3g} steps on {joined.size} ranks, which is "
            f"{epochs[0]:.3g} epochs of {of_ranks:.0f} steps, and within {taken[1]:.3g} steps on "
            f"one, which is {epochs[1]:.3g} epochs of {alone:.0f} steps. Is the number of epochs "
            "another one on more ranks?",
            values={"steps": taken[0], "epochs": epochs[0], "epochs_of_one": epochs[1]},
        )


def _changes(facts: RankFacts, key: int, group: int) -> NDArray[np.float64]:
    """Return by how much a learning rate differs from that of the first step, in each step.

    Relative to the rate with which the optimizer was made; up to where it turns.
    """
    made = next((one.initial_rates for one in facts.optimizers if one.key == key), [])
    steps = [one.learning_rates for one in facts.steps if one.optimizer == key]
    rates = np.array([one[group] for one in steps if group < len(one)])
    if not len(rates):
        return rates
    unit = made[group] if group < len(made) and made[group] else rates[0] or 1.0
    changes: NDArray[np.float64] = (rates - rates[0]) / unit
    first = next((change for change in changes if change), 0.0)
    turns = np.diff(changes) * np.sign(first) < 0
    return changes[: int(turns.argmax()) + 1] if turns.any() else changes


def _growth(joined: JoinedRuns, single: RankFacts) -> float | None:
    """Return the samples of a step of N ranks, relative to those of the script on one."""
    of_ranks, alone = next(iter(joined.steps), None), next(joint_steps([single]), None)
    of_one = sum(alone.samples) if alone is not None else 0
    return sum(of_ranks.samples) / of_one if of_ranks is not None and of_one else None


def epoch_steps(facts: RankFacts) -> float:
    """Return the optimizer steps of a whole epoch, also if it was shortened; 0 if unknown."""
    every = facts.passes(Phase.TRAINING).values()
    # A stream has no plan: its batches are known if it was read to its end.
    lengths = [x.batches + x.skipped if x.is_read else len(x.planned or []) for x in every]
    counts = [len(step.backwards) for step in facts.steps[:8] if step.backwards]
    usual = max(set(counts), key=counts.count) if counts else 1
    return next((batches / usual for batches in lengths if batches), 0.0)


def calls_per_step(schedule: ScheduleFacts) -> float | None:
    """Return how often the schedule advances per optimizer step; None if once per epoch."""
    if len(schedule.steps) < 3:
        return None
    distinct = len(set(schedule.steps))
    taken = schedule.steps[-1] - schedule.steps[0] + 1
    if distinct < 0.6 * taken:
        return None
    return len(schedule.steps) / distinct
