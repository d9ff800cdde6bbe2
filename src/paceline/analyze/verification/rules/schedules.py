"""Learning rates and their schedules."""

from collections.abc import Iterator

import numpy as np

from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.steps import SCHEDULE_END, OptimizerFacts, ScheduleFacts
from ..mistakes import MISTAKES, Certainty, Finding
from ..view import View, unique

SAME = 1e-6  # relative difference of equal learning rates
SHORT = 0.95  # of an epoch: a schedule of the whole training is not shorter
DECAYS = ("CosineAnnealingLR", "OneCycleLR", "PolynomialLR", "MultiStepLR", "LambdaLR")
CYCLES = ("OneCycleLR", "CyclicLR")  # set all rates from their own arguments
LEAST_RATES = 5  # of the first steps, from which a schedule is continued
FITTED = 1e-3  # relative difference of rates that are on a line or a cosine
LARGER = 1.5  # largest rates of a schedule differ a little where they fall between two steps
ROUND = 50  # lengths that are multiples of it may be typed, and not computed from a loader


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
                    unique(lines),
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
                return


def scaling(view: View) -> Iterator[Finding]:
    """Compare the initial learning rate with that of one rank."""
    single, n = view.single, view.size
    if single is None or n < 2:
        return
    growth = _growth(view, single)
    for optimizer in view.ranks[0].optimizers:
        other = _optimizer(single, optimizer.key)
        if other is None:
            continue
        ratios = _ratios(view, single, optimizer, other)
        if not ratios:
            continue
        # Schedules that depend on the number of steps move at other speeds on N ranks and on one.
        twice = next((one for one in ratios if one > n * 1.5 and _are_equal(one, n * n)), None)
        largest = twice or max(ratios)
        ours, theirs = ratios[largest]
        if twice is not None:
            yield Finding(
                MISTAKES["learning-rate-scaled-twice"],
                unique([optimizer.line, *_schedule_lines(view, optimizer.key)]),
                f"The learning rate is {ours:.6g} on {n} ranks and {theirs:.6g} on one: "
                f"{n * n} times as large, with {_batch_growth(growth)}.",
                values={"rate": ours, "rate_of_one": theirs, "ranks": n},
            )
            return
        if growth is not None and _are_equal(growth, 1.0) and _are_equal(largest, n):
            yield Finding(
                MISTAKES["learning-rate-scaled-twice"],
                unique([optimizer.line]),
                f"The learning rate is {n} times that of one rank ({ours:.6g} and {theirs:.6g}), "
                "but the global batch is that of one rank. Is this wanted?",
                values={"rate": ours, "rate_of_one": theirs, "ranks": n},
                certainty=Certainty.QUESTION,
                remedy="scale the learning rate with the global batch size, and not with the "
                "number of ranks",
            )
            return
        is_same = _are_equal(largest, 1.0) or _start_equal(view, single, optimizer, other)
        if is_same and growth is not None and growth > 1.01:
            cycles = [one.line for one in _cycles(view, optimizer)]
            if not cycles:
                ours = next((rate for rate in optimizer.initial_rates if rate > 0), ours)
            yield Finding(
                MISTAKES["learning-rate-not-scaled"],
                unique([*cycles, optimizer.line]),
                f"The {'largest ' * bool(cycles)}learning rate is {ours:.6g} on one rank and on "
                f"{n}, with {growth:.3g} times the global batch: is {ours * growth:.6g} wanted?",
                values={"rate": ours, "growth": growth, "scaled": ours * growth},
            )
            return


def schedule_length(view: View) -> Iterator[Finding]:
    """Find schedules whose length is that of a training on one rank."""
    single, n = view.single, view.size
    if single is None or n < 2:
        return
    pairs = [
        (one, other)
        for one, other in zip(view.ranks[0].schedules, single.schedules, strict=False)
        if one.class_name == other.class_name
    ]
    for schedule, other in [*pairs, *_own_schedules(view.ranks[0], single)]:
        ours, theirs = epoch_steps(view.ranks[0]), epoch_steps(single)
        calls, their_calls = calls_per_step(schedule), calls_per_step(other)
        if not ours or not theirs or calls is None or their_calls is None:
            continue
        shrinks = theirs / ours  # the steps of an epoch are so many times fewer on N ranks
        if shrinks < 1.2:
            continue
        for name, lengths in schedule.lengths.items():
            if not lengths or not other.lengths.get(name):
                continue
            length, single_length = lengths[-1], other.lengths[name][-1]
            epochs = length / calls / ours
            single_epochs = single_length / their_calls / theirs
            factor = epochs / single_epochs if single_epochs else 0.0
            if abs(factor * shrinks - 1) <= 0.1 and _is_computed(length, ours):
                yield _too_short(view, schedule, (name, length), (epochs, single_epochs))
                return
            if abs(factor / shrinks - 1) > 0.1:
                continue
            if single_epochs < 0.95:
                continue  # shorter than an epoch: a warm-up with a number of steps
            computed = _is_computed(single_length, theirs)
            if name == SCHEDULE_END and not computed:
                continue
            certain = computed and not _is_round(single_length)
            yield Finding(
                MISTAKES["schedule-counts-other-steps"],
                unique([schedule.line, *schedule.step_lines[:1]]),
                f"{schedule.class_name} has {name} = {length}: on one rank that is "
                f"{single_epochs:.3g} epochs of {theirs:.0f} steps, on {n} ranks {epochs:.3g} "
                f"epochs of {ours:.0f} steps. A training with the same number of epochs ends after "
                f"1/{factor:.2g} of the schedule."
                + ("" if certain else " Is the number of epochs larger on more ranks?"),
                values={"length": length, "epochs": epochs, "epochs_of_one": single_epochs},
                certainty=None if certain else Certainty.QUESTION,
            )
            return


def _too_short(
    view: View, schedule: ScheduleFacts, length: tuple[str, int], epochs: tuple[float, float]
) -> Finding:
    return Finding(
        MISTAKES["schedule-counts-other-steps"],
        unique([schedule.line, *schedule.step_lines[:1]]),
        f"{schedule.class_name} has {length[0]} = {length[1]}: that is {epochs[1]:.3g} epochs on "
        f"one rank and {epochs[0]:.3g} on {view.size}, where it advances "
        f"{calls_per_step(schedule):.3g} times in a step.",
        values={"length": length[1], "epochs": epochs[0], "epochs_of_one": epochs[1]},
        remedy="count the calls of scheduler.step(): a wrapper may make one for each rank",
    )


def _own_schedules(ours: RankFacts, theirs: RankFacts) -> list[tuple[ScheduleFacts, ScheduleFacts]]:
    """Return the script's own schedules, whose rates fall to 0 in a line or as a cosine does."""
    found = []
    for optimizer in ours.optimizers:
        other = _optimizer(theirs, optimizer.key)
        if other is None or any(one.optimizer == optimizer.key for one in ours.schedules):
            continue
        made, of_one = _fitted(ours, optimizer), _fitted(theirs, other)
        if made is not None and of_one is not None:
            found.append((made, of_one))
    return found


def _fitted(facts: RankFacts, optimizer: OptimizerFacts) -> ScheduleFacts | None:
    """Return the schedule that continues the first rates of an optimizer to 0."""
    steps = [one for one in facts.steps if one.optimizer == optimizer.key]
    rates = np.array([one.learning_rates[0] for one in steps[:LEAST_RATES] if one.learning_rates])
    if len(rates) < LEAST_RATES or (np.diff(rates) >= 0).any() or rates[-1] <= 0:
        return None
    numbers = np.arange(len(rates))
    for start in (rates[0], optimizer.initial_rates[0]):
        if start < rates[0]:
            continue
        angles = np.arccos(np.clip(2 * rates / start - 1, -1, 1)) / np.pi
        for values in (1 - rates / start, angles):
            slope, offset = np.polyfit(numbers, values, 1)
            if np.abs(values - slope * numbers - offset).max() <= FITTED * values[-1]:
                end = (1 - offset) / slope
                length = round(end + (1 if offset > FITTED else 0))
                lines = optimizer.rate_lines[:1] or [optimizer.line]
                ends, advances = {SCHEDULE_END: [length]}, list(range(1, len(steps) + 1))
                return ScheduleFacts(
                    "The learning rate", lines[0], optimizer.key, ends, lines, advances
                )
    return None


def schedule_unit(view: View) -> Iterator[Finding]:
    """Find schedules that advance with each step and are as long as a number of epochs."""
    steps = epoch_steps(view.ranks[0])
    epochs = max((len(one.passes) for one in view.training), default=0)
    for schedule in view.ranks[0].schedules:
        calls = calls_per_step(schedule)
        if schedule.class_name not in DECAYS or calls is None or epochs < 2 or not steps:
            continue
        for name, lengths in schedule.lengths.items():
            if schedule.class_name == "LambdaLR" and name != SCHEDULE_END:
                continue
            length = lengths[-1] if lengths else 0
            if not 1 <= length / calls < SHORT * steps:
                continue
            yield Finding(
                MISTAKES["schedule-counts-other-steps"],
                unique([schedule.line, *schedule.step_lines[:1]]),
                f"{schedule.class_name} has {name} = {length} and advances with each of the "
                f"{steps:.0f} steps of an epoch: it is over within the first epoch. Is {length} a "
                "number of epochs?",
                values={"length": length, "epoch_steps": steps},
                certainty=Certainty.QUESTION,
                remedy="call scheduler.step() once per epoch, or give the schedule the number of "
                "steps of all epochs",
            )
            return


def _are_equal(one: float, two: float) -> bool:
    return abs(one - two) <= SAME * max(abs(one), abs(two), 1e-30)


def _optimizer(facts: RankFacts, key: int) -> OptimizerFacts | None:
    return next((one for one in facts.optimizers if one.key == key), None)


def _rate_lines(view: View, key: int) -> list[str]:
    """Return lines that change learning rates, those of some ranks first."""
    found = [one.rate_lines for facts in view.ranks if (one := _optimizer(facts, key)) is not None]
    every = unique([line for lines in found for line in lines])
    return sorted(every, key=lambda line: all(line in lines for lines in found))


def _same_initial(view: View, key: int) -> bool:
    rates = [one.initial_rates for f in view.ranks if (one := _optimizer(f, key)) is not None]
    return all(one == rates[0] for one in rates)


def _schedule_lines(view: View, key: int) -> list[str]:
    return [one.line for one in view.ranks[0].schedules if one.optimizer == key]


def _ratios(
    view: View, single: RankFacts, ours: OptimizerFacts, theirs: OptimizerFacts
) -> dict[float, tuple[float, float]]:
    """Return ratios of learning rates with both values: when made, in the same steps, largest.

    Of a schedule that sets all rates itself, only its largest rates count.
    """
    peaks = [
        (one.class_name in CYCLES, a, b)
        for one, two in zip(view.ranks[0].schedules, single.schedules, strict=False)
        if (one.optimizer, two.optimizer) == (ours.key, theirs.key)
        for a, b in zip(one.peaks, two.peaks, strict=False)
        if a > 0 and b > 0
    ]
    if any(is_cycle for is_cycle, _, _ in peaks):
        return {a / b: (a, b) for is_cycle, a, b in peaks if is_cycle}
    pairs = list(zip(ours.initial_rates, theirs.initial_rates, strict=False))
    by_index = {one.index: one for one in single.steps if one.optimizer == theirs.key}
    for step in view.ranks[0].steps:
        other = by_index.get(step.index)
        if step.optimizer == ours.key and other is not None:
            pairs += list(zip(step.learning_rates, other.learning_rates, strict=False))
    pairs += [(a, b) for _, a, b in peaks if a > LARGER * b]
    return {a / b: (a, b) for a, b in reversed(pairs) if a > 0 and b > 0}


def _cycles(view: View, optimizer: OptimizerFacts) -> list[ScheduleFacts]:
    """Return the schedules of an optimizer that set all rates themselves."""
    of_optimizer = [one for one in view.ranks[0].schedules if one.optimizer == optimizer.key]
    return [one for one in of_optimizer if one.class_name in CYCLES and one.peaks]


def _start_equal(
    view: View, single: RankFacts, ours: OptimizerFacts, theirs: OptimizerFacts
) -> bool:
    """Return whether the rates are equal when made and in the first step, where the schedules are
    torch's own: these scale the rate by what they are given, and not by the number of ranks later.
    """
    schedules = [one for one in view.ranks[0].schedules if one.optimizer == ours.key]
    if not schedules or any(one.class_name == "LambdaLR" for one in schedules):
        return False
    firsts = [
        next((one.learning_rates for one in facts.steps if one.optimizer == key), [])
        for facts, key in ((view.ranks[0], ours.key), (single, theirs.key))
    ]
    pairs = [*zip(ours.initial_rates, theirs.initial_rates, strict=False)]
    return bool(firsts[0]) and all(
        _are_equal(a, b) for a, b in [*pairs, *zip(*firsts, strict=False)]
    )


def _growth(view: View, single: RankFacts) -> float | None:
    """Return the global batch of N ranks, relative to the batch that the script uses on one."""
    if view.runs.alone is None:
        loaders = [s.first.loader for s in view.training]
        sizes = {
            (one.line, one.batch_size): None for one in single.loaders if one.batch_size is not None
        }
        for loader in loaders:
            for line, size in sizes:
                if line == loader.line and size and loader.batch_size:
                    return view.size * loader.batch_size / size
        return None
    mine = [one.samples for f in view.ranks for one in f.batches[:1]]
    theirs = [one.samples for one in single.batches[:1]]
    return sum(mine) / theirs[0] if mine and theirs and theirs[0] else None


def _batch_growth(growth: float | None) -> str:
    return (
        "another global batch" if growth is None else f"a global batch {growth:.3g} times as large"
    )


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


def _is_computed(length: int, steps: float) -> bool:
    """Return whether a length is a whole number of epochs, with or without the last batch."""
    return any(
        each > 0 and length % each == 0 and length >= each
        for each in (round(steps), round(steps) - 1, round(steps) + 1)
    )


def _is_round(length: int) -> bool:
    return length % ROUND == 0 or len(str(length).rstrip("0")) < 2
