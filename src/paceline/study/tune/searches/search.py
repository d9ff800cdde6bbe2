"""What a search is: it decides which trial runs next, and whether a trial continues.

A search is a small class over an Optuna study, which holds everything that it knows: the runner may
be killed after any call, and a new search over the same study continues. The runner calls

- ``ask`` when there is room for a trial,
- ``report`` when a trial has reported the metric at a step at which the search decides,
- ``tell`` when a trial has ended or paused,
- ``finish`` when the study is complete.

``Search`` itself draws points with an Optuna sampler, and stops trials with an Optuna pruner.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from ....record.trial_reports import CONTINUE, PAUSE, STOP
from ..parameters import Value, is_active
from ..study_file import StudySpec

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

# User attributes of trials in the journal.
FAILURE, RUN_FIGURES, KNOWN = "paceline:failure", "paceline:run", "paceline:known"

# Returns the sampler for a trial, given its number.
MakeSampler = Callable[[int], Any]


class Decision(StrEnum):
    """Whether a trial continues, pauses with a checkpoint, or ends."""

    CONTINUE = CONTINUE
    PAUSE = PAUSE
    STOP = STOP


class MissedStepError(ValueError):
    """A trial has passed a step at which it should have reported; the message says how to."""


@dataclass(frozen=True)
class Work:
    """A trial that is to be run, from its beginning or from its checkpoint.

    Attributes:
        trial: Optuna's trial.
        values: Values of the parameters that exist.
        ranks: Number of ranks.
        checkpoint_of: Number of another trial whose last checkpoint this one begins from, if it
            has none.
    """

    trial: "Trial"
    values: dict[str, Value]
    ranks: int
    checkpoint_of: int | None = None

    @property
    def number(self) -> int:
        return self.trial.number


@dataclass(frozen=True)
class Failure:
    """Why a trial failed.

    Attributes:
        kind: One of those of trial_folder.py.
        text: The reason, with the last lines of the output.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """How a run of a trial ended.

    Attributes:
        state: "complete", "failed", "stopped" by the search, or "paused" by it.
        values: Of a complete trial: the value of each metric.
        failure: Of a failed trial.
    """

    state: Literal["complete", "failed", "stopped", "paused"]
    values: Sequence[float] = ()
    failure: Failure | None = None


class Search:
    """A sampler and a pruner of Optuna.

    Args:
        study: The study.
        spec: The study file.
        make_sampler: Returns the sampler of each new trial. It is seeded by the number of the trial
            where a runner that was killed would otherwise draw the same points again.

    Attributes:
        rungs: Steps at which it pauses trials; the command then needs {checkpoint}.
        count: Number of trials that were begun.
        points: Number of points that the sampler has; None: no limit.
        running: Numbers of the trials that run now, set by the runner. A trial that is to pause is
            one of them until it has ended.
        interrupted: Trials that ran when the runner ended, and are run again.
        exchanges: Whether trials begin from checkpoints of others, with other parameters. A trial
            that has paused is then complete.
    """

    rungs: Sequence[int] = ()
    exchanges = False

    def __init__(self, study: "Study", spec: StudySpec, make_sampler: MakeSampler) -> None:
        self.study, self.spec, self.make_sampler = study, spec, make_sampler
        self.points: int | None = None
        self.running: set[int] = set()
        found = study.get_trials(deepcopy=False)
        self.count = sum(trial.state.name != "WAITING" for trial in found)
        self.interrupted = [
            trial for trial in found if trial.state.name == "RUNNING" and not self.is_paused(trial)
        ]

    @classmethod
    def check(cls, spec: StudySpec) -> None:
        """Raise ValueError if the study file does not fit this search."""

    @classmethod
    def numbers_of_ranks(cls, spec: StudySpec) -> Sequence[int]:
        """Return the numbers of ranks that trials may have."""
        return [spec.table.ranks]

    def decides_at(self) -> tuple[bool, Sequence[int]]:
        """Return whether trials wait for a decision at every step, and otherwise at which."""
        return self.spec.table.pruner != "none" and not self.rungs, self.rungs

    def is_paused(self, trial: "FrozenTrial") -> bool:
        """Return whether a trial that has not ended waits to be promoted."""
        return False

    def rung_of(self, trial: "FrozenTrial") -> int:
        """Return the number of rungs that a trial has reached."""
        return 0

    def lineage(self, trial: "FrozenTrial") -> tuple[int | None, int | None]:
        """Return the generation of a trial, and the trial from whose checkpoint it began."""
        return None, None

    def first_step(self, trial: "FrozenTrial") -> int:
        """Return the step of the checkpoint from which a trial began."""
        return 0

    def unneeded(self) -> Sequence[int]:
        """Return the numbers of trials whose checkpoints are not needed any more."""
        return ()

    def ask(self, may_begin: bool) -> Work | None:
        """Return what to run next, or None if there is nothing now.

        Args:
            may_begin: Whether the budget allows a further trial.
        """
        if self.interrupted:
            return self.work(self.trial_of(self.interrupted.pop(0)))
        if not may_begin or (self.points is not None and self.count >= self.points):
            return None
        return self.begin()

    def begin(self) -> Work:
        """Begin a new trial."""
        self.study.sampler = self.make_sampler(self.count)
        trial = self.study.ask()
        self.count += 1
        return self.work(trial)

    def work(self, trial: "Trial") -> Work:
        """Return the work of a trial, and draw the values that it does not have yet."""
        return Work(trial, draw(self.spec, trial), self.spec.table.ranks)

    def trial_of(self, found: "FrozenTrial") -> "Trial":
        """Return a trial of the journal as one that can be continued."""
        from optuna.trial import Trial

        self.study.sampler = self.make_sampler(found.number)
        return Trial(self.study, found._trial_id)

    def report(self, work: Work, step: int, value: float) -> Decision:
        """Store an intermediate value, and return whether the trial continues.

        Raises:
            MissedStepError: The trial has not reported at the step at which it pauses.
        """
        is_new = self.store(work, step, value)
        trial = self.study.get_trials(deepcopy=False)[work.number]
        if self.spec.table.pruner == "none" or step != trial.last_step:
            return Decision.CONTINUE
        if not is_new:  # the last runner may have been killed before it stored the decision
            trial = _before_pruner(trial, trial.intermediate_values[step])
        stops = self.study.pruner.prune(self.study, trial)
        return Decision.STOP if stops else Decision.CONTINUE

    def has_reached_pause(self, work: Work) -> bool:
        """Return whether a trial whose checkpoint others begin from has reported at its pause."""
        return False

    def store(self, work: Work, step: int, value: float) -> bool:
        """Store an intermediate value; return False if a trial that was continued repeats it."""
        known = self.study.get_trials(deepcopy=False)[work.number].intermediate_values
        if step in known:
            return False
        work.trial.report(value, step)
        return True

    def tell(self, work: Work, outcome: Outcome) -> None:
        """Store how a run of a trial ended."""
        from optuna.trial import TrialState

        if outcome.state == "complete":
            self.study.tell(work.number, list(outcome.values))
        elif outcome.state == "stopped":
            self.study.tell(work.number, state=TrialState.PRUNED)
        elif outcome.state == "failed":
            assert outcome.failure is not None
            failure = {"kind": outcome.failure.kind, "text": outcome.failure.text}
            work.trial.set_user_attr(FAILURE, failure)
            self.study.tell(work.number, state=TrialState.FAIL)

    def finish(self) -> None:
        """End the study: its budget of trials is used."""

    def next_text(self) -> str:
        """Return what the search will do next, for the live table; "" if nothing is known."""
        return "a new trial" if self.count < self.spec.table.trials else ""


def _before_pruner(trial: "FrozenTrial", value: float) -> "FrozenTrial":
    """Return a trial as Optuna's pruners saw it first at its last step.

    Successive halving stores the value in each rung that it looks at, and does not decide about
    that rung again.
    """
    found = copy.copy(trial)
    found.system_attrs = {
        key: stored
        for key, stored in trial.system_attrs.items()
        if not (key.startswith("completed_rung_") and stored == value)
    }
    return found


def draw(spec: StudySpec, trial: "Trial") -> dict[str, Value]:
    """Return the values of the parameters that exist in a trial; the trial keeps those it has."""
    values: dict[str, Value] = {}
    for parameter in spec.parameters:
        if is_active(parameter, values):
            values[parameter.name] = parameter.draw(trial)
    return values
