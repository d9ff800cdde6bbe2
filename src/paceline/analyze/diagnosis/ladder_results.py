"""Results of the ladder of experiments, and the names of its rungs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...record.experiments.rung import CACHED, CHANNELS_LAST, EVERYTHING, ONE_THREAD, SILENT, Rung
from ..records.load_run import Run
from ..records.operator_file import OperatorFiles
from .descriptions import Experiment, FirstRun
from .evidence import MIN_SHARE
from .rare_events import Survey, book_rare, pooled
from .rungs import RungResult, measure_rung, measure_switched, resources_used
from .table import INDICATORS

# Experiments that only some scripts need, chosen by the first run of ``paceline diagnose``.
#
# A cause whose share is only estimated is a hypothesis. Its experiment is part of each round of the
# ladder, so that its interval is that of the rounds.

MAX_SEPARATE_RUNS = 2  # of each round, in addition to those of one rank and of all ranks
MIN_EXPECTED_SHARE = MIN_SHARE / 2  # of a step; a first run of few steps is uncertain
EXPERIMENTS = [
    indicator.experiment for indicator in INDICATORS.values() if indicator.experiment is not None
]


def why_not_set(run: Run, knob: str) -> str:
    """Return why no rank of a run has set a knob; "" if one has."""
    each = [record.meta.get("knobs", {}).get(knob, {}) for record in run.records]
    if any(one.get("set") for one in each):
        return ""
    why = next((one["why_not"] for one in each if one.get("why_not")), "")
    return why or "the script never calls what the knob changes"


@dataclass(frozen=True)
class Hypothesis:
    """An experiment, and the share of a step that it is expected to save."""

    experiment: Experiment
    expected: float

    def measure(self, run: Run, rung: Rung) -> tuple[dict[str, RungResult], list[float]]:
        """Return the results by the rung's name, and the savings of a switched phase."""
        phase = self.experiment.phase
        if self.experiment.is_switched:
            found = measure_switched(run, rung, phase)
            results = (found.reference, found.without)
            return dict(zip(self.experiment.rungs, results, strict=True)), found.savings
        first = rung.first_measured_step(phase)
        return {self.experiment.rung: measure_rung(run, first, rung.steps, phase)}, []

    def why_void(self, run: Run) -> str:
        """Return why the run did not test the hypothesis; empty if it did."""
        for name in self.experiment.settings:
            if why := why_not_set(run, name):
                return f"{name} has no effect: {why}"
        facts = [record.meta.get("rung", {}) for record in run.records]
        return self.experiment.why_void(facts, resources_used(facts, self.experiment.phase))


def hypotheses(first: FirstRun) -> list[Hypothesis]:
    """Return the experiments that the first run suggests, the largest expected share first."""
    found = [
        Hypothesis(experiment, experiment.expected(first))
        for experiment in EXPERIMENTS
        if experiment.expected is not None
    ]
    worth = sorted(
        (tested for tested in found if tested.expected >= MIN_EXPECTED_SHARE),
        key=lambda tested: -tested.expected,
    )
    separate = [tested for tested in worth if tested.experiment.is_separate][:MAX_SEPARATE_RUNS]
    return [tested for tested in worth if not tested.experiment.is_separate or tested in separate]


# How a ladder ended.
COMPLETE, OUT_OF_TIME, INTERRUPTED, FAILED = "complete", "out-of-time", "interrupted", "failed"

# Rungs by name: whether only one rank runs, and the phase of its run.
RUNGS = {
    "alone": (True, CACHED),
    "alone, loading": (True, EVERYTHING),
    "alone, channels-last": (True, CHANNELS_LAST),
    "silent": (False, SILENT),
    "one thread": (False, ONE_THREAD),
    "cached": (False, CACHED),
    "everything": (False, EVERYTHING),
}
WORDS = {
    "alone": "one rank, batches in memory",
    "alone, loading": "one rank, everything",
    "silent": "all ranks, batches in memory, no communication",
    "cached": "all ranks, batches in memory",
    "everything": "all ranks, everything",
    "loader": "all ranks, loaders only",
    **{rung: words for experiment in EXPERIMENTS for rung, words in experiment.rungs.items()},
}


@dataclass
class Ladder:
    """Results of the ladder of experiments.

    Attributes:
        warm: Warm-up steps of each phase.
        steps: Measured steps of each phase.
        rungs: Results of each rung, one per round.
        run: Last run of all ranks; nothing is switched off from step ``warm`` to ``warm + steps``.
        first: The first run, with all ranks, which precedes the rounds.
        loader: Totals of the loaders when they run without training, or None.
        seconds: Duration of the whole ladder.
        refused: Rungs that could not be run, with the reason.
        notes: Remarks for the user.
        ended: "complete", or why there are fewer rounds than needed: "out-of-time", "interrupted"
            or "failed".
        survey: What happens seldom in the training; None if it could not be seen.
        rounds: The run of all ranks of each round, with its first step and the step after its last
            one, between which nothing is switched off.
        savings: By name of a switched phase: share of a step that its part takes, by pair of
            blocks of all rounds.
        operators: Profiles of operators.
    """

    warm: int
    steps: int
    rungs: dict[str, list[RungResult]]
    run: Run
    first: Run
    loader: dict[str, float] | None = None
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: str = COMPLETE
    survey: Survey | None = None
    rounds: list[tuple[Run, tuple[int, int]]] = field(default_factory=list)
    savings: dict[str, list[float]] = field(default_factory=dict)
    operators: OperatorFiles = field(default_factory=lambda: OperatorFiles([], []))

    @property
    def run_s(self) -> float:
        """Mean duration of a run, at most: runs for single hypotheses are not counted."""
        return self.seconds / (2 * len(self.rounds) + 1)

    def add(self, tested: Experiment, results: dict[str, RungResult], savings: list[float]) -> None:
        """Add what a round measured of an experiment."""
        for name, result in results.items():
            self.rungs.setdefault(name, []).append(result)
        if savings:
            self.savings.setdefault(tested.rung, []).extend(savings)

    def drop(self, tested: Experiment) -> None:
        """Remove the results of an experiment that tests nothing."""
        for name in tested.rungs:
            self.rungs.pop(name, None)
        self.savings.pop(tested.rung, None)

    def keep_rounds(self, count: int, only_alone: bool = False) -> None:
        """Discard results of rounds after the first ``count``."""
        for name, rungs in self.rungs.items():
            if not only_alone or name.startswith(("alone", CHANNELS_LAST)):
                del rungs[count:]
        if only_alone:
            return
        del self.rounds[count:]
        if self.rounds:
            self.run, (first, end) = self.rounds[-1]
            self.warm, self.steps = first, end - first

    def book_rare(self, phases: int, hypotheses: Sequence[Hypothesis]) -> None:
        """Compare rungs with the same share of validation and checkpoints in each.

        ``phases`` is the largest number of phases of a run.
        """
        seen, least = self.survey, phases * (self.warm + self.steps)
        is_partial = seen is not None and (seen.missing_s > 0 or not seen.epoch_batches)
        if seen is not None and is_partial and seen.steps < least:
            self.survey = None  # the experiments have seen more
        names = [name for name, (alone, _) in RUNGS.items() if not alone and name in self.rungs]
        seen = self.survey or pooled([result for name in names for result in self.rungs[name]])
        # Steps of switched phases are without validation and checkpoints already.
        experiments = [hypothesis.experiment for hypothesis in hypotheses]
        tested = [experiment.rung for experiment in experiments if not experiment.is_switched]
        names += [name for name in tested if name in self.rungs]
        if seen is not None:
            self.rungs |= {name: book_rare(self.rungs[name], seen) for name in names}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Facts about the script from each rank of the last run (record/experiments/observer.py).

        "exchange" is the backend of the rank's collectives if it is not one of PyTorch, else None.
        """
        metas = [record.meta for record in self.run.records]
        return [meta.get("rung", {}) | {"exchange": meta.get("exchange")} for meta in metas]


def rung_name(alone: bool, phase: str) -> str:
    """Return the name of the rung that runs a phase with one or with all ranks."""
    return next((name for name, rung in RUNGS.items() if rung == (alone, phase)), phase)
