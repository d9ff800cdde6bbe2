"""Population-based training: members that exchange checkpoints, and change parameters on the way.

A population of ``size`` members is trained in generations of ``every`` epochs (Jaderberg et al.,
arXiv 1711.09846). After a generation the worst members continue from the checkpoints of the best
ones, with parameters that are perturbed. One member in one generation is one trial of Optuna, which
is complete when it pauses at the end of its generation. The next generation begins when all trials
of the last one have ended, so it follows from their values alone: a runner that was killed begins
the same one.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..command import CHECKPOINT, EPOCHS
from ..parameters import Parameter, Value, nearest
from ..study_file import BEST, MAX, StudySpec
from .search import Decision, MakeSampler, MissedStepError, Outcome, Search, Work

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

POPULATION = "population"  # the name in study files
# User attributes: where a trial is in the population, and from whose checkpoint it began.
GENERATION, MEMBER, PARENT = "paceline:generation", "paceline:member", "paceline:parent"
DEFAULT_SIZE, DEFAULT_GENERATIONS, MIN_SIZE = 8, 10, 2


@dataclass(frozen=True)
class PopulationOptions:
    """Options of the table ``[pruner]``, checked.

    Attributes:
        size: Number of members.
        every: Epochs of a generation.
        share: Part of the members that is replaced, and part that is copied.
        factors: A perturbed number is multiplied by one of them.
        resample: Probability that a parameter is drawn anew instead.
        perturb: Names of the parameters that change; the others remain those of the parent.
        generations: Number of generations.
    """

    size: int
    every: int
    share: float
    factors: tuple[float, ...]
    resample: float
    perturb: tuple[str, ...]
    generations: int

    @property
    def replaced(self) -> int:
        """Number of members that are replaced after a generation."""
        return min(max(round(self.size * self.share), 1), self.size // 2)


@dataclass(frozen=True)
class Child:
    """A trial of the next generation.

    Attributes:
        parent: Number of the trial whose checkpoint it begins from.
        values: Its parameters; those that it does not have are drawn.
    """

    parent: int
    values: dict[str, Value]


class PopulationSearch(Search):
    """Population-based training in generations."""

    exchanges = True

    def __init__(self, study: "Study", spec: StudySpec, make_sampler: MakeSampler) -> None:
        self.options = read_options(spec)
        super().__init__(study, spec, make_sampler)
        self.points = self.options.size * self.options.generations
        count = self.options.generations
        self.rungs = [self.options.every * number for number in range(1, count)]

    @classmethod
    def check(cls, spec: StudySpec) -> None:
        read_options(spec)

    def lineage(self, trial: "FrozenTrial") -> tuple[int | None, int | None]:
        parent = trial.user_attrs.get(PARENT)
        return generation_of(trial), None if parent is None else int(parent)

    def first_step(self, trial: "FrozenTrial") -> int:
        return generation_of(trial) * self.options.every

    def ask(self, may_begin: bool) -> Work | None:
        if self.interrupted or not may_begin:
            return super().ask(may_begin)
        trials = self.study.get_trials(deepcopy=False)
        if any(one.state.name == "WAITING" for one in trials):
            return self.begin()
        if len(_of(trials, 0)) < self.options.size:
            return self.begin()
        last = max(map(generation_of, trials))
        members = self._members(trials, last)
        if len(members) < self.options.size:  # a runner was killed while it added them
            self._enqueue(members, last)
            return self.begin()
        if last + 1 < self.options.generations and all(one.state.is_finished() for one in members):
            self._enqueue([], last + 1)
            return self.begin()
        return None

    def work(self, trial: Any) -> Work:
        work = super().work(trial)
        parent = trial.user_attrs.get(PARENT)
        return work if parent is None else Work(work.trial, work.values, work.ranks, int(parent))

    def report(self, work: Work, step: int, value: float) -> Decision:
        self.store(work, step, value)
        end = self._pause_step(work)
        if end is None or step < end:
            return Decision.CONTINUE
        if step > end and end not in self._values(work):
            every = step - generation_of(work.trial) * self.options.every
            raise MissedStepError(
                f"it reported step {step}, and not step {end}, the end of its generation. HINT: "
                f"report every epoch, or every = {every}"
            )
        return Decision.PAUSE if step == end else Decision.CONTINUE

    def has_reached_pause(self, work: Work) -> bool:
        return self._pause_step(work) in self._values(work)

    def _pause_step(self, work: Work) -> int | None:
        """Return the last step of a trial's generation; None: it is the last generation."""
        end = (generation_of(work.trial) + 1) * self.options.every
        return end if end in self.rungs else None

    def _values(self, work: Work) -> dict[int, float]:
        return self.study.get_trials(deepcopy=False)[work.number].intermediate_values

    def tell(self, work: Work, outcome: Outcome) -> None:
        if outcome.state == "paused":  # its generation has ended
            found = self._values(work)
            best = max if self.spec.goals[0] == MAX else min
            is_best = self.spec.table.value == BEST
            value = best(found.values()) if is_best else found[max(found)]
            outcome = Outcome("complete", [value])
        super().tell(work, outcome)

    def unneeded(self) -> list[int]:
        """Return the trials whose checkpoints no trial will begin from.

        The best trial keeps its own, and so do those of the last two generations.
        """
        trials = self.study.get_trials(deepcopy=False)
        done = [one for one in trials if one.state.name == "COMPLETE"]
        if not done:
            return []
        last = max(map(generation_of, trials))
        best = self._ranked(done)[0].number
        return [
            one.number
            for one in trials
            if one.state.is_finished() and generation_of(one) < last - 1 and one.number != best
        ]

    def next_text(self) -> str:
        trials = self.study.get_trials(deepcopy=False)
        last = max(map(generation_of, trials), default=0)
        return f"generation {last} (the last one is {self.options.generations - 1})"

    # The next generation

    def _members(self, trials: "Sequence[FrozenTrial]", generation: int) -> "list[FrozenTrial]":
        """Return the trials of a generation, by member.

        Other programs may have added points: the first ones are the first generation.
        """
        found = _of(trials, generation)
        if generation == 0:
            return found[: self.options.size]
        return sorted(found, key=lambda one: int(one.user_attrs[MEMBER]))

    def _ranked(self, trials: "Iterable[FrozenTrial]") -> "list[FrozenTrial]":
        """Return the trials that have a value, the best one first."""
        sign = -1 if self.spec.goals[0] == MAX else 1
        found = [one for one in trials if one.state.name == "COMPLETE"]
        return sorted(found, key=lambda one: (sign * one.values[0], one.number))

    def children(self, generation: int) -> list[Child]:
        """Return the trials of a generation, by member: they follow from those before.

        Raises:
            ValueError: All trials of the generation before have failed.
        """
        trials = self.study.get_trials(deepcopy=False)
        members = self._members(trials, generation - 1)
        ranked = self._ranked(members)
        if not ranked:
            raise ValueError(
                f"all {len(members)} trials of generation {generation - 1} have failed, so no "
                "checkpoint is left to continue from. HINT: paceline tune --show has the reasons; "
                "correct the cause or the ranges, then --fork"
            )
        good = ranked[: min(self.options.replaced, max(len(ranked) // 2, 1))]
        # Failed trials are replaced, and the worst of the others up to the number of replaced ones.
        worst = max(self.options.replaced - (len(members) - len(ranked)), 0)
        bad = {one.number for one in ranked[max(len(good), len(ranked) - worst) :]}
        found = []
        for member, one in enumerate(members):
            draw = random.Random(self._seed(generation, member))
            if one.state.name == "COMPLETE" and one.number not in bad:
                found.append(Child(one.number, dict(one.params)))
                continue
            parent = draw.choice(good)
            values = {
                parameter.name: self._changed(parameter, parent.params[parameter.name], draw)
                for parameter in self.spec.parameters
                if parameter.name in parent.params
            }
            found.append(Child(parent.number, values))
        return found

    def _enqueue(self, members: "Sequence[FrozenTrial]", generation: int) -> None:
        """Add the trials of a generation, without the members that it has."""
        there = {int(one.user_attrs[MEMBER]) for one in members}
        for member, child in enumerate(self.children(generation)):
            if member not in there:
                attributes = {GENERATION: generation, MEMBER: member, PARENT: child.parent}
                self.study.enqueue_trial(dict(child.values), user_attrs=attributes)

    def _seed(self, generation: int, member: int) -> int:
        text = f"{self.spec.table.seed}/{generation}/{member}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _changed(self, parameter: Parameter, value: Value, draw: random.Random) -> Value:
        """Return a parameter of a child, from that of its parent."""
        if parameter.name not in self.options.perturb:
            return value
        again, factor = draw.random() < self.options.resample, draw.choice(self.options.factors)
        if again:
            return parameter.at(draw.random())
        return parameter.near(value, factor)


def _of(trials: "Iterable[FrozenTrial]", generation: int) -> "list[FrozenTrial]":
    return [one for one in trials if generation_of(one) == generation]


def generation_of(trial: Any) -> int:
    """Return the generation of a trial; points that were drawn or given are of the first one."""
    return int(trial.user_attrs.get(GENERATION, 0))


def read_options(spec: StudySpec) -> PopulationOptions:
    """Return the options of the table ``[pruner]``. Raises ValueError."""
    options, table = spec.pruner_options, spec.table
    known = ("size", "every", "share", "factors", "resample", "perturb")
    for name in options:
        if name not in known:
            near = nearest(name, known) or ", ".join(known)
            raise ValueError(f"the key pruner.{name} is not known for population. HINT: {near}")
    if table.epochs is None:
        raise ValueError(
            "population-based training needs the number of epochs of a member. HINT: epochs = 30 "
            "in [study]"
        )
    if CHECKPOINT not in spec.command.placeholders and not spec.command.function:
        raise ValueError(
            "population-based training continues members from the checkpoints of others, and "
            "study.command has no {checkpoint}. HINT: train.py --checkpoint {checkpoint}, the "
            "folder of world.epochs(checkpoint=...)"
        )
    if EPOCHS not in spec.command.placeholders and not spec.command.function:
        raise ValueError(
            "population-based training needs {epochs} in study.command, the epochs of all "
            "generations together. HINT: train.py --epochs {epochs}"
        )
    size = _integer(options, "size", DEFAULT_SIZE, MIN_SIZE)
    every = _integer(options, "every", max(table.epochs // DEFAULT_GENERATIONS, 1), 1)
    if every >= table.epochs:
        raise ValueError(
            f"pruner.every = {every} leaves one generation: study.epochs is {table.epochs}. HINT: "
            f"every = {max(table.epochs // DEFAULT_GENERATIONS, 1)}"
        )
    generations = -(-table.epochs // every)
    if table.trials < size * generations:
        raise ValueError(
            f"study.trials = {table.trials} is too small: {size} members and {generations} "
            f"generations of {every} epochs are {size * generations} trials. HINT: trials = "
            f"{size * generations}"
        )
    share = _number(options, "share", 0.25, 0.0, 0.5)
    resample = _number(options, "resample", 0.25, 0.0, 1.0)
    factors = options.get("factors", [0.8, 1.25])
    is_list = isinstance(factors, list) and factors
    if not is_list or not all(_is_number(one) and one > 0 for one in factors):
        raise ValueError(f"pruner.factors = {factors!r} must be a list of numbers above 0")
    return PopulationOptions(
        size, every, share, tuple(factors), resample, _perturbed(spec), generations
    )


def _perturbed(spec: StudySpec) -> tuple[str, ...]:
    """Return the names of the parameters that change: by default, the numbers."""
    names = {one.name for one in spec.parameters}
    numbers = [one.name for one in spec.parameters if not one.choices]
    chosen = spec.pruner_options.get("perturb", numbers)
    if not isinstance(chosen, list) or not all(isinstance(one, str) for one in chosen):
        raise ValueError("pruner.perturb must be a list of names of parameters")
    for name in chosen:
        if name not in names:
            near = nearest(name, names) or ", ".join(sorted(names))
            raise ValueError(f"pruner.perturb names no parameter: {name}. HINT: {near}")
    if not chosen:
        raise ValueError(
            "no parameter changes during the training: pruner.perturb is empty, or all parameters "
            "have choices. HINT: perturb = [...] names parameters that may change"
        )
    return tuple(chosen)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(options: dict[str, Any], name: str, default: int, least: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"pruner.{name} must be an integer of at least {least}; it is {value}")
    return value


def _number(options: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = options.get(name, default)
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"pruner.{name} must be between {low:g} and {high:g}; it is {value}")
    return float(value)
