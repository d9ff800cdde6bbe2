"""Searches whose trials pause with a checkpoint, from which they or others continue."""

import hashlib
import itertools
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

# Promotion: asynchronous successive halving whose trials pause at rungs with a checkpoint.
#
# Every trial is trained to the first rung, and pauses there. When there is room, a trial is
# promoted that is among the best 1/``eta`` of those that have reached its rung (the highest rung
# first), and continues from its checkpoint to the next one; only if there is none, a new trial
# begins (Li et al., arXiv 1810.05934). Optuna's successive halving can't pause trials: it decides
# when a trial reaches a rung, and a trial that it stopped never continues.

# User attribute: number of rungs after which the trial was promoted. That it has reached a rung
# follows from its intermediate values: one write, between whose parts no runner can be killed.
ALLOWED = "paceline:allowed"
DEFAULT_ETA, DEFAULT_FIRST = 3, 1


def reached(trial: "FrozenTrial", rungs: Sequence[int]) -> list[float]:
    """Return the values of a trial at the rungs that it has reached."""
    values = trial.intermediate_values
    return [values[step] for step in itertools.takewhile(values.__contains__, rungs)]


def rungs_of(first: int, eta: int, epochs: int) -> list[int]:
    """Return the steps of the rungs before the end of a trial."""
    steps, step = [], first
    while step < epochs:
        steps.append(step)
        step *= eta
    return steps


class PromotionSearch(Search):
    """Asynchronous successive halving with checkpoints.

    Options of the table ``[pruner]``: ``eta``, ``first`` (step of the first rung) and ``ranks``
    (number of ranks up to each rung, and after the last one).
    """

    def __init__(self, study: "Study", spec: StudySpec, make_sampler: MakeSampler) -> None:
        self.eta, self.rungs, self.ranks = read_promotion(spec)
        self._better = max if spec.goals[0] == "max" else min
        super().__init__(study, spec, make_sampler)

    @classmethod
    def check(cls, spec: StudySpec) -> None:
        read_promotion(spec)

    @classmethod
    def numbers_of_ranks(cls, spec: StudySpec) -> Sequence[int]:
        return read_promotion(spec)[2]

    def rung_of(self, trial: "FrozenTrial") -> int:
        return len(reached(trial, self.rungs))

    def is_paused(self, trial: "FrozenTrial") -> bool:
        return self.rung_of(trial) > int(trial.user_attrs.get(ALLOWED, 0))

    def ask(self, may_begin: bool) -> Work | None:
        if self.interrupted:
            return super().ask(may_begin)
        found = self._promotable(1 / self.eta)
        if found is None and not may_begin:
            found = self._last_promotion()
        if found is None:
            return super().ask(may_begin)
        trial = self.trial_of(found)
        trial.set_user_attr(ALLOWED, self.rung_of(found))
        return self.work(trial)

    def work(self, trial: Any) -> Work:
        work = super().work(trial)
        segment = trial.user_attrs.get(ALLOWED, 0)
        return Work(work.trial, work.values, self.ranks[segment])

    def report(self, work: Work, step: int, value: float) -> Decision:
        self.store(work, step, value)
        rung = self.rung_of(self.study.get_trials(deepcopy=False)[work.number]) - 1
        allowed = work.trial.user_attrs.get(ALLOWED, 0)
        if rung < 0 or step != self.rungs[rung] or allowed > rung:
            return Decision.CONTINUE
        same_ranks = self.ranks[rung] == self.ranks[rung + 1]
        if same_ranks and work.number in self._best(rung, 1 / self.eta):
            work.trial.set_user_attr(ALLOWED, rung + 1)  # it would be promoted next: go on
            return Decision.CONTINUE
        return Decision.PAUSE

    def finish(self) -> None:
        for found in self._paused():
            work = Work(self.trial_of(found), {}, 1)
            super().tell(work, Outcome("stopped"))

    def next_text(self) -> str:
        found = self._promotable(1 / self.eta)
        if found is None:
            return super().next_text()
        return f"trial {found.number} continues after step {self.rungs[self.rung_of(found) - 1]}"

    def _trials(self) -> "list[FrozenTrial]":
        return [trial for trial in self.study.get_trials(deepcopy=False) if self.rung_of(trial)]

    def _paused(self) -> "list[FrozenTrial]":
        return [
            trial
            for trial in self._trials()
            if trial.state.name == "RUNNING"
            and trial.number not in self.running
            and self.is_paused(trial)
        ]

    def _best(self, rung: int, share: float, least: int = 0) -> list[int]:
        """Return the numbers of the best trials of those that have reached a rung."""
        sign = -1 if self._better is max else 1
        there = [
            (sign * values[rung], trial.number)
            for trial in self._trials()
            if len(values := reached(trial, self.rungs)) > rung
        ]
        most = max(int(len(there) * share + 1e-9), least)
        return [number for _, number in sorted(there)[:most]]

    def _promotable(self, share: float, least: int = 0) -> "FrozenTrial | None":
        """Return a paused trial that is among the best of its rung; the highest rung first."""
        paused = self._paused()
        for rung in range(len(self.rungs) - 1, -1, -1):
            at_rung = {trial.number: trial for trial in paused if self.rung_of(trial) == rung + 1}
            for number in self._best(rung, share, least) if at_rung else []:
                if number in at_rung:
                    return at_rung[number]
        return None

    def _last_promotion(self) -> "FrozenTrial | None":
        """Return the best paused trial of the highest rung from which no trial was promoted.

        This happens if too few trials have reached the rung for one of them to be among the best.
        """
        for rung in range(len(self.rungs) - 1, -1, -1):
            there = [trial for trial in self._trials() if self.rung_of(trial) > rung]
            if any(trial.user_attrs.get(ALLOWED, 0) > rung for trial in there):
                return None
            if there:
                return self._promotable(0.0, least=1)
        return None


def read_promotion(spec: StudySpec) -> tuple[int, list[int], list[int]]:
    """Return eta, the rungs, and the ranks of each segment. Raises ValueError."""
    options, table = spec.pruner_options, spec.table
    epochs = _check_table(spec, ("eta", "first", "ranks"))
    eta, first = (
        _integer(options, "eta", DEFAULT_ETA, 2),
        _integer(options, "first", DEFAULT_FIRST, 1),
    )
    rungs = rungs_of(first, eta, epochs)
    if not rungs:
        raise ValueError(
            f"there is no rung before the end of a trial: pruner.first = {first} and study.epochs "
            f"= {table.epochs}. HINT: first = 1"
        )
    ranks = options.get("ranks", [table.ranks] * (len(rungs) + 1))
    if not isinstance(ranks, list) or not all(isinstance(n, int) and n >= 1 for n in ranks):
        raise ValueError("pruner.ranks must be a list of numbers of ranks")
    if len(ranks) != len(rungs) + 1:
        raise ValueError(
            f"pruner.ranks has {len(ranks)} numbers, and a trial has {len(rungs) + 1} parts: up to "
            f"the rungs at {', '.join(map(str, rungs))}, and to the end. HINT: one number for each"
        )
    return eta, rungs, ranks


# Population-based training: members that exchange checkpoints, and change parameters on the way.
#
# A population of ``size`` members is trained in generations of ``every`` epochs (Jaderberg et al.,
# arXiv 1711.09846). After a generation the worst members continue from the checkpoints of the best
# ones, with parameters that are perturbed. One member in one generation is one trial of Optuna,
# which is complete when it pauses at the end of its generation. The next generation begins when
# all trials of the last one have ended, so it follows from their values alone: a runner that was
# killed begins the same one.

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
        resample: Probability that a parameter is drawn from its range instead.
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
        if any(trial.state.name == "WAITING" for trial in trials):
            return self.begin()
        if len(_of(trials, 0)) < self.options.size:
            return self.begin()
        last = max(map(generation_of, trials))
        members = self._members(trials, last)
        if len(members) < self.options.size:  # a runner was killed while it added them
            self._enqueue(members, last)
            return self.begin()
        if last + 1 < self.options.generations and all(
            member.state.is_finished() for member in members
        ):
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
        done = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if not done:
            return []
        last = max(map(generation_of, trials))
        best = self._ranked(done)[0].number
        return [
            trial.number
            for trial in trials
            if trial.state.is_finished()
            and generation_of(trial) < last - 1
            and trial.number != best
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
        return sorted(found, key=lambda trial: int(trial.user_attrs[MEMBER]))

    def _ranked(self, trials: "Iterable[FrozenTrial]") -> "list[FrozenTrial]":
        """Return the trials that have a value, the best one first."""
        sign = -1 if self.spec.goals[0] == MAX else 1
        found = [trial for trial in trials if trial.state.name == "COMPLETE"]
        return sorted(found, key=lambda trial: (sign * trial.values[0], trial.number))

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
        bad = {trial.number for trial in ranked[max(len(good), len(ranked) - worst) :]}
        found = []
        for member, trial in enumerate(members):
            draw = random.Random(self._seed(generation, member))
            if trial.state.name == "COMPLETE" and trial.number not in bad:
                found.append(Child(trial.number, dict(trial.params)))
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
        there = {int(member.user_attrs[MEMBER]) for member in members}
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
    return [trial for trial in trials if generation_of(trial) == generation]


def generation_of(trial: Any) -> int:
    """Return the generation of a trial; points that were drawn or given are of the first one."""
    return int(trial.user_attrs.get(GENERATION, 0))


def _check_table(spec: StudySpec, known: Sequence[str]) -> int:
    """Check the keys of the table ``[pruner]``, and the command; return the epochs of a training.

    Raises:
        ValueError: A key is unknown, or the command can't be continued from checkpoints.
    """
    name = spec.table.pruner
    for key in spec.pruner_options:
        if key not in known:
            near = nearest(key, known) or ", ".join(known)
            raise ValueError(f"the key pruner.{key} is not known for {name}. HINT: {near}")
    if spec.table.epochs is None:
        raise ValueError(
            f'pruner = "{name}" needs the number of epochs of a whole training. HINT: epochs = 30 '
            "in [study]"
        )
    if CHECKPOINT not in spec.command.placeholders and not spec.command.function:
        raise ValueError(
            f'pruner = "{name}" continues trials from checkpoints, and study.command has no '
            "{checkpoint}. HINT: train.py --checkpoint {checkpoint}, the folder of "
            'world.epochs(checkpoint=...); or pruner = "successive-halving"'
        )
    return spec.table.epochs


def read_options(spec: StudySpec) -> PopulationOptions:
    """Return the options of the table ``[pruner]``. Raises ValueError."""
    options, table = spec.pruner_options, spec.table
    known = ("size", "every", "share", "factors", "resample", "perturb")
    epochs = _check_table(spec, known)
    if EPOCHS not in spec.command.placeholders and not spec.command.function:
        raise ValueError(
            "population-based training needs {epochs} in study.command, the epochs of all "
            "generations together. HINT: train.py --epochs {epochs}"
        )
    size = _integer(options, "size", DEFAULT_SIZE, MIN_SIZE)
    every = _integer(options, "every", max(epochs // DEFAULT_GENERATIONS, 1), 1)
    if every >= epochs:
        raise ValueError(
            f"pruner.every = {every} leaves one generation: study.epochs is {epochs}. HINT: "
            f"every = {max(epochs // DEFAULT_GENERATIONS, 1)}"
        )
    generations = -(-epochs // every)
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
    if not is_list or not all(_is_number(factor) and factor > 0 for factor in factors):
        raise ValueError(f"pruner.factors = {factors!r} must be a list of numbers above 0")
    return PopulationOptions(
        size, every, share, tuple(factors), resample, _perturbed(spec), generations
    )


def _perturbed(spec: StudySpec) -> tuple[str, ...]:
    """Return the names of the parameters that change: by default, the numbers."""
    names = {parameter.name for parameter in spec.parameters}
    numbers = [parameter.name for parameter in spec.parameters if not parameter.choices]
    chosen = spec.pruner_options.get("perturb", numbers)
    if not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen):
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
