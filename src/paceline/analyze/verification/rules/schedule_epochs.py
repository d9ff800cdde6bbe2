"""Schedules beside the whole training, where its number of epochs is known."""

from collections.abc import Iterator

from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import Phase
from ....record.training.facts.steps import SCHEDULE_END, ScheduleFacts
from ..mistakes import MISTAKES, Finding
from ..view import View, unique
from .schedules import calls_per_step, epoch_steps

# Lengths after which a learning rate has arrived at its end.
ENDS = {"T_max", "total_steps", SCHEDULE_END, "num_training_steps"}
NEAR = 0.04  # relative difference of equal lengths: incomplete batches and steps
LEAST_EPOCHS = 2


def schedule_of_training(view: View) -> Iterator[Finding]:
    """Find schedules that count batches or samples of one rank, and advance with each step."""
    facts = view.ranks[0]
    steps, epochs = epoch_steps(facts), epochs_of(facts)
    if not steps or epochs < LEAST_EPOCHS:
        return
    whole = epochs * steps
    for schedule in facts.schedules:
        calls = calls_per_step(schedule)
        if calls is None:
            continue
        accumulated = view.accumulated.get(schedule.optimizer, 1)
        units = {accumulated: f"the {accumulated} batches of each step", view.size: "one rank"}
        for name in ENDS & schedule.lengths.keys():
            length = (schedule.lengths[name] or [0])[-1]
            ratio = length / (calls * whole)
            for unit, what in units.items():
                if unit > 1 and abs(ratio / unit - 1) <= NEAR:
                    yield _finding(schedule, (name, length), (epochs, steps), (unit, what))
                    return


def epochs_of(facts: RankFacts) -> int:
    """Return the number of epochs of the loop that the script trains in; 0 if unknown."""
    for loader in facts.loaders:
        passes = [one for one in loader.passes if one.phase is Phase.TRAINING]
        if not passes:
            continue
        is_loop = [one.epoch for one in passes] == list(range(len(passes)))
        return passes[0].epochs if is_loop and len(passes) > 1 else 0
    return 0


def _finding(
    schedule: ScheduleFacts,
    length: tuple[str, int],
    training: tuple[int, float],
    unit: tuple[int, str],
) -> Finding:
    epochs, steps = training
    counted = (
        f"It counts {unit[1]}." if "batches" in unit[1] else f"It counts the steps of {unit[1]}."
    )
    return Finding(
        MISTAKES["schedule-counts-other-steps"],
        unique([schedule.line, *schedule.step_lines[:1]]),
        f"{schedule.class_name} has {length[0]} = {length[1]}, and the {epochs} epochs of the "
        f"training have {epochs * steps:.0f} steps: it ends after 1/{unit[0]} of the schedule. "
        f"{counted}",
        values={"length": length[1], "steps": epochs * steps, "epochs": epochs},
        remedy="compute its length from the number of optimizer steps on N ranks: "
        "epochs * len(loader) // accumulated batches, after the split",
    )
