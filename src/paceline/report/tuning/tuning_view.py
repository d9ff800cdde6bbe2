"""A study as people look at it: its trials, the best ones, and what is left of the budget."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX = "max"

# States of a trial.
WAITING, RUNNING, PAUSED = "waiting", "running", "paused"
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Attributes:
        number: Its number.
        state: One of the states above.
        parameters: Values of its parameters.
        values: Value of each metric, of a complete trial.
        last: Last value of the first metric, of any trial.
        step: Step of that value; None if there is none.
        rung: Number of rungs that it has reached.
        ranks: Number of ranks of its last run.
        seconds: Wall time of all its runs.
        node_hours: Node-hours of all its runs.
        failure: Kind of its failure, or "".
        reason: The failure in one line, or "".
        known: Whether it is a point that the user gave.
        started: When it started (s since 1970); None if it has not.
        intermediate: Values of the first metric by step.
        first_step: Step of the checkpoint from which it began.
        generation: Its generation in a population, from 0; None if there is none.
        parent: Trial from whose checkpoint it began; None if there is none.
        waits_for: What its last run waited for longest: "input", "exchange", "cores", or "".
        waits: Share of its time that it waited.
        noise: Gradient noise scale of its last run (samples) with its interval, or ().
    """

    number: int
    state: str
    parameters: dict[str, bool | int | float | str]
    values: Sequence[float] = ()
    last: float | None = None
    step: int | None = None
    rung: int = 0
    ranks: int = 1
    seconds: float = 0.0
    node_hours: float = 0.0
    failure: str = ""
    reason: str = ""
    known: bool = False
    started: float | None = None
    intermediate: dict[int, float] = field(default_factory=dict)
    first_step: int = 0
    generation: int | None = None
    parent: int | None = None
    waits_for: str = ""
    waits: float = 0.0
    noise: Sequence[float] = ()

    @property
    def steps(self) -> int:
        """Number of steps that it has trained itself."""
        return max((self.step or 0) - self.first_step, 0)


@dataclass(frozen=True)
class SearchGain:
    """What a search has gained over random points at the same budget.

    Attributes:
        reason: Why it can't be told, or "".
        count: Number of trials of that budget.
        random, searched: Numbers of trials that are compared.
        best_random, best_searched: Expected best value of ``count`` of them.
        difference: Gain, above 0 where the search is better.
        low, high: Its 95 % interval.
        decided: Whether it is more than chance.
    """

    reason: str
    count: int = 0
    random: int = 0
    searched: int = 0
    best_random: float = 0.0
    best_searched: float = 0.0
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    decided: bool = False


@dataclass(frozen=True)
class TuningView:
    """A study.

    Attributes:
        name: Its name in the journal.
        journal: Path of the journal.
        metrics, goals: Its metrics, and "min" or "max" for each.
        rows: The trials, by number.
        best: Numbers of the best trial; with several metrics, of the Pareto front.
        planned: Maximum number of trials.
        command: The command with placeholders, or the function.
        best_command: Command of the best trial, without ``paceline run``; "" if there is none.
        search: Sampler and pruner in words.
        importances: Share of each parameter in the differences between trials; empty if they can't
            be determined.
        importance_note: Why there are none, or of which trials they are, or "".
        next_text: What the search does next, or "".
        left_s: Time until the end of the budget; None without a limit.
        elapsed_s: Time since this call began.
        gain: What the search has gained over random points; None if it was not determined.
        running: Seconds since the start of each running trial, by number.
        notes: Sentences about the study.
    """

    name: str
    journal: str
    metrics: Sequence[str]
    goals: Sequence[str]
    rows: Sequence[TrialRow]
    best: Sequence[int] = ()
    planned: int = 0
    command: str = ""
    best_command: str = ""
    search: str = ""
    importances: dict[str, float] = field(default_factory=dict)
    importance_note: str = ""
    next_text: str = ""
    left_s: float | None = None
    elapsed_s: float = 0.0
    gain: SearchGain | None = None
    running: dict[int, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def count(self, state: str) -> int:
        """Return the number of trials in a state."""
        return sum(row.state == state for row in self.rows)

    def ancestry(self, number: int) -> list[TrialRow]:
        """Return the trials that trained a trial's model one after the other; itself is last."""
        found = [self.rows[number]]
        while (parent := found[0].parent) is not None and parent < found[0].number:
            found.insert(0, self.rows[parent])
        return found

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, in the order in which trials have them."""
        return list(dict.fromkeys(name for row in self.rows for name in row.parameters))


class TuneListener:
    """Receives what happens while a study runs. Does nothing itself."""

    def study_started(self, view: TuningView) -> None:
        """The study begins or is continued."""

    def trial_started(self, row: TrialRow, view: TuningView) -> None:
        """A trial was started, promoted or repeated."""

    def trial_ended(self, row: TrialRow, view: TuningView) -> None:
        """A trial ended or paused."""

    def progress(self, view: TuningView) -> None:
        """A trial has reported a value."""

    def message(self, text: str) -> None:
        """Something that the user should know."""

    def study_ended(self, view: TuningView) -> None:
        """The study is complete or interrupted."""
