"""Learning rates and their schedules.

Ranks with different learning rates differ. What is another on N ranks than on one is the user's
choice, and asked with both values.
"""

from collections.abc import Iterator
from math import isclose

from ....observe.facts.ranks import RankFacts
from ....observe.facts.steps import ScheduleFacts
from ..joined_runs import JoinedRuns
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..relations import EQUAL_WITHIN
from ..steps import JointStep, joint_steps

EQUAL_LENGTHS = 0.1  # relative difference of equal lengths: incomplete batches and steps
MIN_PEAK_RATIO = (
    1.5  # largest rates of a schedule differ a little where they fall between two steps
)
CYCLES = ("OneCycleLR", "CyclicLR")  # set all rates from their own arguments

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
        "a question: the length of the schedule in epochs, on N ranks and on one",
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
    single, n = joined.single, joined.size
    growth = _growth(joined, single) if single is not None and n > 1 else None
    for optimizer in joined.ranks[0].optimizers:
        if single is None or growth is None:
            return
        runs = (joined.ranks[0], single)
        both = [_rates(facts, optimizer.key, of_cycles=True) for facts in runs]
        if not all(both):
            both = [_rates(facts, optimizer.key, of_cycles=False) for facts in runs]
        pairs = [
            (a, b)
            for at, row in enumerate(zip(*both, strict=False))
            for a, b in zip(*row, strict=False)
            if min(a, b) > 0 and (at < 2 or a > MIN_PEAK_RATIO * b)
        ]
        if not pairs:
            continue
        ours, theirs = max(pairs, key=lambda pair: pair[0] / pair[1])
        more = f"{growth:.3g} times the global batch"
        schedules = [one for one in joined.ranks[0].schedules if one.optimizer == optimizer.key]
        cycles = [one.line for one in schedules if one.class_name in CYCLES and one.peaks]
        may_scale_later = any(one.class_name == "LambdaLR" for one in schedules)
        if (
            isclose(ours, theirs, rel_tol=EQUAL_WITHIN)
            and growth > 1 + EQUAL_LENGTHS
            and not may_scale_later
        ):
            kind, text = "not-scaled", f"{ours:.6g} on one rank and on {n}, with {more}: is "
            text += f"{ours * growth:.6g} wanted?"
        elif ours / theirs > growth * (1 + EQUAL_LENGTHS):
            kind, text = "scaled-twice", f"{ours:.6g} on {n} ranks and {theirs:.6g} on one: "
            text += f"{ours / theirs:.3g} times as large, with {more}. Is this wanted?"
        else:
            continue
        yield Finding(
            MISTAKES[f"learning-rate-{kind}"],
            [*cycles, optimizer.line, *(one.line for one in schedules)],
            f"The learning rate is {text}",
            values={"rate": ours, "rate_of_one": theirs, "growth": growth},
        )


def _rates(facts: RankFacts, key: int, of_cycles: bool) -> list[list[float]]:
    """Return learning rates of an optimizer: when made, in the first step, the largest ones.

    of_cycles: Only those of schedules that set all rates themselves.
    """
    peaks = [one for one in facts.schedules if one.optimizer == key and one.peaks]
    if of_cycles:
        return [one.peaks for one in peaks if one.class_name in CYCLES]
    made = next((one.initial_rates for one in facts.optimizers if one.key == key), [])
    first = next((one.learning_rates for one in facts.steps if one.optimizer == key), made)
    return [made, first, *(one.peaks for one in peaks)]


def schedule_length(joined: JoinedRuns) -> Iterator[Finding]:
    """Ask about schedules that have another length in epochs on N ranks than on one."""
    single, n = joined.single, joined.size
    if single is None:
        return
    for schedule, other in zip(joined.ranks[0].schedules, single.schedules, strict=False):
        ours, theirs = epoch_steps(joined.ranks[0]), epoch_steps(single)
        calls, their_calls = calls_per_step(schedule), calls_per_step(other)
        if schedule.class_name != other.class_name or not ours or not theirs:
            continue
        if calls is None or their_calls is None:
            continue
        pairs = [
            (name, *both)
            for name, lengths in schedule.lengths.items()
            for both in zip(lengths, other.lengths.get(name, []), strict=False)
        ]
        for name, length, their_length in pairs[::-1]:
            epochs, of_one = length / calls / ours, their_length / their_calls / theirs
            if of_one < 1 - EQUAL_LENGTHS or abs(epochs / of_one - 1) <= EQUAL_LENGTHS:
                continue  # shorter than an epoch: a warm-up with a number of steps
            yield Finding(
                MISTAKES["schedule-counts-other-steps"],
                [schedule.line, *schedule.step_lines[:1]],
                f"{schedule.class_name} has {name} = {length} on {n} ranks, which is "
                f"{epochs:.3g} epochs of {ours:.0f} steps, and {their_length} on one, "
                f"which is {of_one:.3g} epochs of {theirs:.0f} steps. Is the number of epochs "
                "another one on more ranks?",
                values={"length": length, "epochs": epochs, "epochs_of_one": of_one},
            )


def _growth(joined: JoinedRuns, single: RankFacts) -> float | None:
    """Return the samples of a step of N ranks, relative to those of the script on one."""
    ours, theirs = next(iter(joined.steps), None), next(joint_steps([single]), None)
    of_one = sum(theirs.samples) if theirs is not None else 0
    return sum(ours.samples) / of_one if ours is not None and of_one else None


def epoch_steps(facts: RankFacts) -> float:
    """Return the optimizer steps of a whole epoch, also if it was shortened; 0 if unknown."""
    for loader in facts.loaders:
        for one in loader.passes:
            batches = len(one.planned or [])
            if one.is_read:  # a stream
                batches = one.batches + one.skipped
            if one.phase.value != "training" or not batches:
                continue
            counts = [len(step.backwards) for step in facts.steps[:8] if step.backwards]
            usual = max(set(counts), key=counts.count) if counts else 1
            return batches / usual
    return 0.0


def calls_per_step(schedule: ScheduleFacts) -> float | None:
    """Return how often the schedule advances per optimizer step; None if once per epoch."""
    if len(schedule.steps) < 3:
        return None
    distinct = len(set(schedule.steps))
    taken = schedule.steps[-1] - schedule.steps[0] + 1
    if distinct < 0.6 * taken:
        return None
    return len(schedule.steps) / distinct
