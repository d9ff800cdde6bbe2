"""Learning rates and their schedules.

Ranks with different learning rates differ. What is another on N ranks than on one is the user's
choice, and asked with both values.
"""

from collections.abc import Iterator

from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.steps import OptimizerFacts, ScheduleFacts
from ..mistakes import MISTAKES, Finding
from ..steps import joint_steps
from ..view import View

SAME = 1e-6  # relative difference of equal learning rates
NEAR = 0.1  # relative difference of equal lengths: incomplete batches and steps
CYCLES = ("OneCycleLR", "CyclicLR")  # set all rates from their own arguments
LARGER = 1.5  # largest rates of a schedule differ a little where they fall between two steps


def rates_differ(view: View) -> Iterator[Finding]:
    """Find ranks with different learning rates in the same step."""
    for step in view.steps:
        rates = [one.learning_rates for one in step.steps]
        for rank in range(1, view.size):
            for group, (ours, theirs) in enumerate(zip(rates[0], rates[rank], strict=False)):
                if _are_equal(ours, theirs):
                    continue
                optimizer = _optimizer(view.ranks[0], step.optimizer)
                schedules = view.ranks[0].schedules
                made = [line for one in schedules for line in (*one.step_lines[:1], one.line)]
                same = optimizer is not None and _same_initial(view, step.optimizer)
                lines = [*_rate_lines(view, step.optimizer), *made]
                lines += [optimizer.line if optimizer else "", step.steps[0].line]
                if not same:
                    lines = [optimizer.line if optimizer else "", *made, step.steps[0].line]
                yield Finding(
                    MISTAKES["learning-rates-differ"],
                    lines,
                    f"In step {step.index + 1}, the learning rate is {ours:.6g} on rank 0 and "
                    f"{theirs:.6g} on rank {rank}"
                    + (
                        f" (parameter group {group})."
                        if len(rates[0]) > 1
                        else ", of equal initial rates."
                        if same
                        else "."
                    ),
                    ranks=[rank],
                    step=step.index + 1,
                    values={"rate_0": ours, f"rate_{rank}": theirs},
                )


def scaling(view: View) -> Iterator[Finding]:
    """Ask about a learning rate that grows otherwise than the global batch."""
    single, n = view.single, view.size
    if single is None or n < 2:
        return
    growth = _growth(view, single)
    for optimizer in view.ranks[0].optimizers:
        other = _optimizer(single, optimizer.key)
        pairs = _rates(view, single, optimizer, other) if other is not None else []
        if not pairs or growth is None:
            continue
        ours, theirs = max(pairs, key=lambda pair: pair[0] / pair[1])
        ratio = ours / theirs
        more = f"{growth:.3g} times the global batch"
        schedules = [one for one in view.ranks[0].schedules if one.optimizer == optimizer.key]
        cycles = [one.line for one in schedules if one.class_name in CYCLES and one.peaks]
        lines = [*cycles, optimizer.line, *(one.line for one in schedules)]
        may_scale_later = any(one.class_name == "LambdaLR" for one in schedules)
        values: dict[str, float | int | str] = {
            "rate": ours,
            "rate_of_one": theirs,
            "growth": growth,
        }
        if _are_equal(ratio, 1.0) and growth > 1 + NEAR and not may_scale_later:
            text = (
                f"The learning rate is {ours:.6g} on one rank and on {n}, with {more}: is "
                f"{ours * growth:.6g} wanted?"
            )
            yield Finding(MISTAKES["learning-rate-not-scaled"], lines, text, values=values)
        if ratio > growth * (1 + NEAR):
            text = (
                f"The learning rate is {ours:.6g} on {n} ranks and {theirs:.6g} on one: "
                f"{ratio:.3g} times as large, with {more}. Is this wanted?"
            )
            yield Finding(MISTAKES["learning-rate-scaled-twice"], lines, text, values=values)


def schedule_length(view: View) -> Iterator[Finding]:
    """Ask about schedules that have another length in epochs on N ranks than on one."""
    single, n = view.single, view.size
    if single is None or n < 2:
        return
    for schedule, other in zip(view.ranks[0].schedules, single.schedules, strict=False):
        ours, theirs = epoch_steps(view.ranks[0]), epoch_steps(single)
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
            if of_one < 1 - NEAR or abs(epochs / of_one - 1) <= NEAR:
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


def _are_equal(one: float, two: float) -> bool:
    return abs(one - two) <= SAME * max(abs(one), abs(two), 1e-30)


def _optimizer(facts: RankFacts, key: int) -> OptimizerFacts | None:
    return next((one for one in facts.optimizers if one.key == key), None)


def _rate_lines(view: View, key: int) -> list[str]:
    """Return lines that change learning rates, those of some ranks first."""
    found = [one.rate_lines for facts in view.ranks if (one := _optimizer(facts, key)) is not None]
    every = dict.fromkeys(line for lines in found for line in lines)
    return sorted(every, key=lambda line: all(line in lines for lines in found))


def _same_initial(view: View, key: int) -> bool:
    rates = [one.initial_rates for f in view.ranks if (one := _optimizer(f, key)) is not None]
    return all(one == rates[0] for one in rates)


def _rates(
    view: View, single: RankFacts, ours: OptimizerFacts, theirs: OptimizerFacts
) -> list[tuple[float, float]]:
    """Return learning rates on N ranks and on one: when made, in the first step, the largest.

    Of a schedule that sets all rates itself, only its largest rates count.
    """
    peaks = [
        (one.class_name in CYCLES, a, b)
        for one, two in zip(view.ranks[0].schedules, single.schedules, strict=False)
        if (one.optimizer, two.optimizer) == (ours.key, theirs.key)
        for a, b in zip(one.peaks, two.peaks, strict=False)
    ]
    if any(is_cycle for is_cycle, _, _ in peaks):
        pairs = [(a, b) for is_cycle, a, b in peaks if is_cycle]
    else:
        firsts = [
            next((one.learning_rates for one in facts.steps if one.optimizer == made.key), [])
            for facts, made in ((view.ranks[0], ours), (single, theirs))
        ]
        pairs = [*zip(ours.initial_rates, theirs.initial_rates, strict=False)]
        pairs += [*zip(*firsts, strict=False), *((a, b) for _, a, b in peaks if a > LARGER * b)]
    return [(a, b) for a, b in pairs if a > 0 and b > 0]


def _growth(view: View, single: RankFacts) -> float | None:
    """Return the samples of a step of N ranks, relative to those of the script on one."""
    ours, theirs = next(iter(view.steps), None), next(joint_steps([single]), None)
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
