"""Promotion: asynchronous successive halving whose trials pause at rungs with a checkpoint.

Every trial is trained to the first rung, and pauses there. When there is room, a trial is promoted
that is among the best 1/``eta`` of those that have reached its rung (the highest rung first), and
continues from its checkpoint to the next one; only if there is none, a new trial begins (Li et al.,
arXiv 1810.05934). Optuna's successive halving can't pause trials: it decides when a trial reaches a
rung, and a trial that it stopped never continues.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..command import CHECKPOINT
from ..study_file import StudySpec
from .search import Decision, MakeSampler, Outcome, Search, Work

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

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
        self.eta, self.rungs, self.ranks = read_options(spec)
        self._better = max if spec.goals[0] == "max" else min
        super().__init__(study, spec, make_sampler)

    @classmethod
    def check(cls, spec: StudySpec) -> None:
        read_options(spec)

    @classmethod
    def numbers_of_ranks(cls, spec: StudySpec) -> Sequence[int]:
        return read_options(spec)[2]

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
        return f"trial {found.number} continues after step {self._last_rung(found)}"

    def _last_rung(self, trial: "FrozenTrial") -> int:
        return self.rungs[self.rung_of(trial) - 1]

    def _trials(self) -> "list[FrozenTrial]":
        return [one for one in self.study.get_trials(deepcopy=False) if self.rung_of(one)]

    def _paused(self) -> "list[FrozenTrial]":
        return [
            one
            for one in self._trials()
            if one.state.name == "RUNNING"
            and one.number not in self.running
            and self.is_paused(one)
        ]

    def _best(self, rung: int, share: float, least: int = 0) -> list[int]:
        """Return the numbers of the best trials of those that have reached a rung."""
        sign = -1 if self._better is max else 1
        there = [
            (sign * values[rung], one.number)
            for one in self._trials()
            if len(values := reached(one, self.rungs)) > rung
        ]
        most = max(int(len(there) * share + 1e-9), least)
        return [number for _, number in sorted(there)[:most]]

    def _promotable(self, share: float, least: int = 0) -> "FrozenTrial | None":
        """Return a paused trial that is among the best of its rung; the highest rung first."""
        paused = self._paused()
        for rung in range(len(self.rungs) - 1, -1, -1):
            here = [one for one in paused if self.rung_of(one) == rung + 1]
            best = self._best(rung, share, least) if here else []
            for number in best:
                for one in here:
                    if one.number == number:
                        return one
        return None

    def _last_promotion(self) -> "FrozenTrial | None":
        """Return the best paused trial of the highest rung from which no trial was promoted.

        There is one if so few trials have reached the rung that none of them is among the best.
        """
        for rung in range(len(self.rungs) - 1, -1, -1):
            there = [one for one in self._trials() if self.rung_of(one) > rung]
            if any(one.user_attrs.get(ALLOWED, 0) > rung for one in there):
                return None
            if there:
                return self._promotable(0.0, least=1)
        return None


def read_options(spec: StudySpec) -> tuple[int, list[int], list[int]]:
    """Return eta, the rungs, and the ranks of each segment. Raises ValueError."""
    options, table = spec.pruner_options, spec.table
    for name in options:
        if name not in ("eta", "first", "ranks"):
            raise ValueError(
                f"the key pruner.{name} is not known for promotion. HINT: eta, first or ranks"
            )
    eta, first = options.get("eta", DEFAULT_ETA), options.get("first", DEFAULT_FIRST)
    for name, value, least in (("eta", eta, 2), ("first", first, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"pruner.{name} must be an integer of at least {least}; it is {value}")
    if table.epochs is None:
        raise ValueError(
            "promotion needs the number of epochs of a whole trial. HINT: epochs = 27 in [study]"
        )
    if CHECKPOINT not in spec.command.placeholders and not spec.command.function:
        raise ValueError(
            "promotion pauses trials and continues them from their checkpoints, and study.command "
            "has no {checkpoint}. HINT: train.py --checkpoint {checkpoint}, the folder of "
            'world.epochs(checkpoint=...); or pruner = "successive-halving"'
        )
    rungs = rungs_of(first, eta, table.epochs)
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
