"""Ladder of experiments of ``paceline diagnose``.

The experiments are short runs of the user's script. Each of them disables something from outside
(record/experiments/rung.py). They are repeated in interleaved rounds until the time budget is used.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...analyze.diagnosis.ladder import EndedError, RungResult, measure_rung
from ...analyze.records.load_run import Run
from ...analyze.records.operator_file import OperatorFile, read_operator_files
from ...plurals import counted
from ...record.experiments.rung import (
    CACHED,
    CHANNELS_LAST,
    EVERYTHING,
    LOADER,
    ONE_THREAD,
    SILENT,
    SWITCHED,
    Rung,
)
from .hypotheses import WORDS as HYPOTHESIS_WORDS
from .hypotheses import Hypothesis, hypotheses
from .run_script import MINUTE_S, FailedError, Runner, RunRequest

FIRST_STEPS = 10  # steps of the first run, which measures the duration of a step
LEAST_STEPS, MOST_STEPS = 10, 400
BURST = 16  # steps; longer bursts are ignored
MIN_STEPS_SHORT_RUN = 3  # if the script ends early, or the budget does not allow LEAST_STEPS
REPETITIONS = (3, 9)  # minimum and maximum number of rounds
# The budget may be exceeded by this factor for LEAST_STEPS, which include occasional operations.
MAX_BUDGET_FACTOR = 2.0
STEP_SHARE_OF_BUDGET = 0.6  # the rest is for starting the runs

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
    "one thread": "all ranks, batches in memory, no communication, one thread per rank",
    "cached": "all ranks, batches in memory",
    "everything": "all ranks, everything",
    "loader": "all ranks, loaders only",
    **HYPOTHESIS_WORDS,
}


@dataclass(frozen=True)
class OperatorFiles:
    """Profiles of the ranks that have one, and the reasons why others have none."""

    files: list[OperatorFile]
    notes: list[str]


@dataclass
class Ladder:
    """Results of the ladder of experiments.

    Attributes:
        warm: Warm-up steps of each phase.
        steps: Measured steps of each phase.
        rungs: Results of each rung, one per round.
        run: Last run of all ranks; nothing is switched off from step ``warm`` to ``warm + steps``.
        rounds: The run of all ranks of each round, with its first step and the step after its last
            one, between which nothing is switched off.
        first: The first run, with all ranks, which precedes the rounds.
        loader: Totals of the loaders when they run without training, or None.
        seconds: Duration of the whole ladder.
        refused: Rungs that could not be run, with the reason.
        notes: Remarks for the user.
        savings: By name of a switched phase: share of a step that its part takes, by pair of
            blocks of all rounds.
        operators: Profiles of operators at the end of the first run.
    """

    warm: int
    steps: int
    rungs: dict[str, list[RungResult]]
    run: Run
    first: Run
    rounds: list[tuple[Run, tuple[int, int]]] = field(default_factory=list)
    loader: dict[str, float] | None = None
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    savings: dict[str, list[float]] = field(default_factory=dict)
    operators: OperatorFiles = field(default_factory=lambda: OperatorFiles([], []))

    def add(self, tested: Hypothesis, results: dict[str, RungResult], savings: list[float]) -> None:
        """Add what a round measured of a hypothesis."""
        for name, result in results.items():
            self.rungs.setdefault(name, []).append(result)
        if savings:
            self.savings.setdefault(tested.rung, []).extend(savings)

    def drop(self, tested: Hypothesis) -> None:
        """Remove the results of a hypothesis that cannot be tested."""
        for name in tested.rungs:
            self.rungs.pop(name, None)
        self.savings.pop(tested.rung, None)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Facts about the script from each rank of the last run (record/experiments/observer.py).

        "exchange" is the backend of the rank's collectives if it is not one of PyTorch, else None.
        """
        metas = [record.meta for record in self.run.records]
        return [meta.get("rung", {}) | {"exchange": meta.get("exchange")} for meta in metas]


def climb_ladder(asked: RunRequest, say: Callable[[str], None]) -> Ladder:
    """Run the ladder.

    Raises:
        ValueError: The script cannot be measured.
    """
    began = time.monotonic()
    with Runner(asked, say) as runner:
        return _Climb(asked, runner, began).all()


class _Climb:
    def __init__(self, asked: RunRequest, runner: Runner, began: float) -> None:
        self.asked, self.runner, self.began = asked, runner, began
        self.workers = 0  # most workers of a rank's loader
        self.starts_s = 0.0  # start-up time of the processes of one round
        self.hypotheses: list[Hypothesis] = []
        self.phases = {True: (EVERYTHING, CACHED), False: (EVERYTHING, CACHED, SILENT, LOADER)}

    def all(self) -> Ladder:
        asked = self.asked
        steps = asked.steps or FIRST_STEPS
        before = time.monotonic()
        run, profile = self._first_run(steps)
        took = time.monotonic() - before - max((one.whole_s for one in profile.files), default=0.0)
        known = measure_rung(run, asked.warming, steps, EVERYTHING)
        self._adapt_to_script(run)
        start_s = took - (steps + asked.warming) * known.step_s
        self.starts_s = (len(self.phases) + len(self._separate)) * max(start_s, 0.1)
        steps = asked.steps or self._choose_steps(known.step_s)
        rungs: dict[str, list[RungResult]] = {
            name: [] for name, (alone, phase) in RUNGS.items() if phase in self.phases[alone]
        }
        found = Ladder(self._warm_up_steps(steps), steps, rungs, run, run, operators=profile)
        limit = asked.minutes * MINUTE_S
        while len(found.rungs["everything"]) < REPETITIONS[1]:
            turn = time.monotonic()
            try:
                self._run_round(found)
            except EndedError as ended:
                self._fit_into_script(found, ended)
                continue
            took, spent = time.monotonic() - turn, time.monotonic() - self.began
            enough = len(found.rungs["everything"]) >= REPETITIONS[0]
            if enough and spent + took > limit:
                break
            if not enough:
                self._shorten_rounds(found, took)
        found.seconds = time.monotonic() - self.began
        if not asked.steps and not found.notes and found.steps < LEAST_STEPS:
            found.notes = [self._few_steps_note(found)]
        return found

    def _first_run(self, steps: int) -> tuple[Run, OperatorFiles]:
        """Return the first run with the operators of its last steps.

        If the script fails while they are profiled, it runs again without.
        """
        rung = Rung(self.asked.warming, steps, (EVERYTHING,), profiles=True)
        try:
            run = self.runner.run(False, rung, self.asked.count)
        except FailedError as failed:
            if failed.steps < rung.warm + rung.steps:
                raise
            note = f"the script fails while its operators are profiled: {failed.short}"
            rung = replace(rung, profiles=False)
            run = self.runner.run(False, rung, self.asked.count)
            return run, OperatorFiles([], [note])
        files, notes = read_operator_files(Path(run.name))
        told = [record.meta.get("rung", {}).get("profile_failure") for record in run.records]
        notes += dict.fromkeys(f"the operators were not profiled: {one}" for one in told if one)
        if not files and not notes:
            notes = ["the operators were not profiled: the script ends after its first steps"]
        return run, OperatorFiles(files, notes)

    def _warm_up_steps(self, steps: int) -> int:
        """Return the number of warm-up steps before ``steps`` measured ones."""
        asked = self.asked.warming
        if self.asked.steps or steps >= LEAST_STEPS:
            return asked
        return min(asked, max(1, steps // 2))

    def _shorten_rounds(self, found: Ladder, took: float) -> None:
        """Measure fewer steps in later rounds if rounds of ``took`` seconds take too long."""
        missing = REPETITIONS[0] - len(found.rungs["everything"])
        share = self._max_step_time_s(missing) / max(took - self.starts_s, 0.1)
        steps = in_bursts(max(MIN_STEPS_SHORT_RUN, int(share * found.steps)), self.workers)
        if share < 1 and steps < found.steps and not self.asked.steps:
            found.steps, found.warm = steps, self._warm_up_steps(steps)

    def _few_steps_note(self, found: Ladder) -> str:
        more = (LEAST_STEPS + self.asked.warming) / (found.steps + found.warm)
        return (
            f"steps are too long for --minutes {self.asked.minutes:g}: each run measured only "
            f"{found.steps}, and the figures are less precise. HINT: --minutes "
            f"{math.ceil(more * found.seconds / MINUTE_S)}"
        )

    def _fit_into_script(self, found: Ladder, ended: EndedError) -> None:
        """Shorten the phases so that all of them fit into a script that ends early."""
        most = max(sum(one != LOADER for one in phases) for phases in self.phases.values())
        steps = ended.done // most - found.warm
        if self.asked.steps or steps < MIN_STEPS_SHORT_RUN or steps >= found.steps:
            raise ended
        found.steps = steps
        found.notes = [
            f"the script ends after {counted(ended.done, 'step')}: each experiment measures only "
            f"{steps}. HINT: let the script train longer for more precise figures"
        ]
        found.rounds.clear()
        for rungs in found.rungs.values():
            rungs.clear()
        found.savings.clear()

    def _choose_steps(self, step_s: float) -> int:
        """Return the number of steps per phase that the budget allows.

        More rounds are better than longer phases, because each round starts new processes: there
        are as many rounds as leave enough of the budget for steps.
        """
        a_round = sum(phase != LOADER for phases in self.phases.values() for phase in phases)
        a_round += len(self._separate)
        left = self.asked.minutes * MINUTE_S - (time.monotonic() - self.began)
        starts = self.starts_s
        rounds = min(
            max(int((1 - STEP_SHARE_OF_BUDGET) * left / starts), REPETITIONS[0]), REPETITIONS[1]
        )
        each = (
            max((left - rounds * starts) / rounds, STEP_SHARE_OF_BUDGET * left / rounds) / a_round
        )
        most = int(each / step_s) - self.asked.warming
        if most >= LEAST_STEPS:
            return in_bursts(min(MOST_STEPS, most), self.workers)
        most = int(self._max_step_time_s(REPETITIONS[0]) / a_round / step_s)
        few = LEAST_STEPS if most > LEAST_STEPS + self.asked.warming else 2 * most // 3
        return in_bursts(max(MIN_STEPS_SHORT_RUN, few), self.workers)

    def _max_step_time_s(self, rounds: int) -> float:
        """Return the maximum time in s for the steps of each of ``rounds`` rounds.

        It is at least the time for starting the runs: shorter phases would save little.
        """
        left = MAX_BUDGET_FACTOR * self.asked.minutes * MINUTE_S - (time.monotonic() - self.began)
        return max(left / rounds - self.starts_s, self.starts_s)

    def _run_round(self, found: Ladder) -> None:
        """Run every rung once, with one rank and with all ranks.

        A rung that fails is left out from now on, and the results of this round are discarded.
        """
        count = len(found.rungs["everything"])
        for alone, phases in self.phases.items():
            left = tuple(one for one in phases if _rung_name(alone, one) not in found.refused)
            if not left:
                continue
            rung = Rung(found.warm, found.steps, left)
            try:
                run = self.runner.run(alone, rung)
            except FailedError as failed:
                number = min(rung.phase_index(failed.steps), len(left) - 1)
                name = _rung_name(alone, left[number])
                if name == "everything":
                    raise
                found.refused |= {_rung_name(alone, one): str(failed) for one in left[number:]}
                for rungs in found.rungs.values():
                    del rungs[count:]
                for one in self.hypotheses:
                    if one.rung in found.refused:
                        found.drop(one)
                return
            for phase in left:
                if phase in SWITCHED:
                    tested = next(one for one in self.hypotheses if one.phase == phase)
                    found.add(tested, *tested.measure(run, rung))
                elif phase != LOADER:
                    taken = measure_rung(run, rung.first_measured_step(phase), found.steps, phase)
                    found.rungs[_rung_name(alone, phase)].append(taken)
            if not alone:
                found.run = run
                found.rounds.append((run, (found.warm, found.warm + found.steps)))
                found.loader = _loader_totals(run) or found.loader
        for one in self._separate:
            if one.rung not in found.refused:
                self._test(one, found)

    @property
    def _separate(self) -> list[Hypothesis]:
        return [one for one in self.hypotheses if one.separate]

    def _test(self, tested: Hypothesis, found: Ladder) -> None:
        """Test a hypothesis in a run of its own; one that cannot be tested is left out."""
        rung = Rung(found.warm, found.steps, (tested.phase,))
        named = f"{counted(found.steps, 'step')} of {tested.rung}"
        try:
            run = self.runner.run(False, rung, settings=tested.settings, named=named)
            why = tested.why_void(run)
        except FailedError as failed:
            why = str(failed)
        if why:
            found.refused[tested.rung] = why
            found.drop(tested)
        else:
            found.add(tested, *tested.measure(run, rung))

    def _adapt_to_script(self, run: Run) -> None:
        """Adapt later runs to what the first run shows of the script.

        A single rank computes with as many threads as one of several ranks, and rungs that only
        some scripts need are added.
        """
        self.runner.as_in(run)
        told = [record.meta.get("rung", {}) for record in run.records]
        self.workers = max(one.get("workers", 0) for one in told)
        self.hypotheses = hypotheses(told)
        alone, switched = (
            [one.phase for one in self.hypotheses if one.alone == single and not one.separate]
            for single in (True, False)
        )
        threads = [ONE_THREAD] if any(one.get("threads", 1) > 1 for one in told) else []
        self.phases[False] = (EVERYTHING, *switched, CACHED, SILENT, *threads, LOADER)
        self.phases[True] = (EVERYTHING, CACHED, *alone)


def in_bursts(steps: int, burst: int) -> int:
    """Round the number of steps up to a multiple of ``burst``, if that is at most BURST.

    Loader workers with equal speed deliver their batches together, in bursts. A part of a burst
    would contain either the whole wait for it, or none.
    """
    return math.ceil(steps / burst) * burst if 1 < burst <= BURST else steps


def _rung_name(alone: bool, phase: str) -> str:
    """Return the name of the rung that runs a phase with one or with all ranks."""
    return next((name for name, rung in RUNGS.items() if rung == (alone, phase)), phase)


def _loader_totals(run: Run) -> dict[str, float] | None:
    """Return the totals of all ranks' loaders when they run without training, or None."""
    told = [record.meta.get("rung", {}).get("loader") for record in run.records]
    known = [one for one in told if one and one["batches"]]
    if not known:
        return None
    return {key: sum(one[key] for one in known) for key in known[0]} | {"ranks": len(known)}
