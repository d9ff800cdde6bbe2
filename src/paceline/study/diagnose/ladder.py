"""The ladder of ``paceline diagnose``: short runs of the user's own script, in each of which
something is switched off from outside (record/experiments/rung.py), in turns until the
budget is spent."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...analyze.diagnosis.ladder import EndedError, RungResult, measure_rung
from ...analyze.records.load_run import Run
from ...record.experiments.rung import (
    CACHED,
    CHANNELS_LAST,
    EVERYTHING,
    LOADER,
    ONE_THREAD,
    SILENT,
    Rung,
)
from .run_script import MINUTE, Asked, FailedError, Runner

FIRST_STEPS = 10  # of the run that shows how long a step takes
LEAST_STEPS, MOST_STEPS = 10, 400
BURST = 16  # steps
FEWEST = 3  # of a script that ends early, or where more are not done in the budget
REPETITIONS = (3, 9)  # at least, at most
OVER = 2.0  # times the budget may be taken for LEAST_STEPS, which see what is done now and then
SHARE = 0.6  # of the budget is for steps; the rest for starting

# Rungs by name: whether of one rank alone, and the phase of its run.
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
    "alone": "one rank, its batch in memory",
    "alone, loading": "one rank, everything",
    "alone, channels-last": "one rank, its batch in memory, images as channels-last",
    "silent": "all ranks, batches in memory, no exchange",
    "one thread": "the same with one thread a rank",
    "cached": "all ranks, batches in memory",
    "everything": "all ranks, everything",
    "loader": "the loaders alone",
}


@dataclass
class Ladder:
    """What was measured. run: the last one of all ranks, in which everything was on from step
    ``warm`` on; first: the one before all others. refused: rungs that could not be run, and why."""

    warm: int
    steps: int
    climbs: dict[str, list[RungResult]]
    run: Run
    first: Run
    loader: dict[str, float] | None = None
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What each rank of the last run said of its script (record/experiments/observer.py), and
        what it exchanges by where that is not torch's own."""
        metas = [record.meta for record in self.run.records]
        return [meta.get("rung", {}) | {"exchange": meta.get("exchange")} for meta in metas]


def climbed(asked: Asked, say: Callable[[str], None]) -> Ladder:
    """Run the ladder. Raises ValueError where the script itself can't be measured."""
    began = time.monotonic()
    with Runner(asked, say) as runner:
        return _Climbing(asked, runner, began).all()


class _Climbing:
    def __init__(self, asked: Asked, runner: Runner, began: float) -> None:
        self.asked, self.runner, self.began = asked, runner, began
        self.workers = 0  # of a rank's loader
        self.starts_s = 0.0  # of a round, that its processes take to start
        self.phases = {True: (EVERYTHING, CACHED), False: (EVERYTHING, CACHED, SILENT, LOADER)}

    def all(self) -> Ladder:
        asked = self.asked
        steps = asked.steps or FIRST_STEPS
        before = time.monotonic()
        run = self.runner.run(False, Rung(asked.warming, steps, (EVERYTHING,)), asked.count)
        took = time.monotonic() - before
        known = measure_rung(run, asked.warming, steps, EVERYTHING)
        self._as_in(run)
        start_s = took - (steps + asked.warming) * known.step_s
        self.starts_s = len(self.phases) * max(start_s, 0.1)
        steps = asked.steps or self._steps(known.step_s)
        climbs: dict[str, list[RungResult]] = {
            name: [] for name, (alone, phase) in RUNGS.items() if phase in self.phases[alone]
        }
        found = Ladder(self._warm(steps), steps, climbs, run, run)
        limit = asked.minutes * MINUTE
        while len(found.climbs["everything"]) < REPETITIONS[1]:
            turn = time.monotonic()
            try:
                self._round(found)
            except EndedError as ended:
                self._fewer(found, ended)
                continue
            took, spent = time.monotonic() - turn, time.monotonic() - self.began
            enough = len(found.climbs["everything"]) >= REPETITIONS[0]
            if enough and spent + took > limit:
                break
            if not enough:
                self._shorter(found, took)
        found.seconds = time.monotonic() - self.began
        if not asked.steps and not found.notes and found.steps < LEAST_STEPS:
            found.notes = [self._few(found)]
        return found

    def _warm(self, steps: int) -> int:
        """Steps before so many that are measured."""
        asked = self.asked.warming
        if self.asked.steps or steps >= LEAST_STEPS:
            return asked
        return min(asked, max(1, steps // 2))

    def _shorter(self, found: Ladder, took: float) -> None:
        """Fewer steps from now on, where the rounds to come take too long if they take what the
        last one ``took``."""
        missing = REPETITIONS[0] - len(found.climbs["everything"])
        share = self._longest(missing) / max(took - self.starts_s, 0.1)
        steps = in_bursts(max(FEWEST, int(share * found.steps)), self.workers)
        if share < 1 and steps < found.steps and not self.asked.steps:
            found.steps, found.warm = steps, self._warm(steps)

    def _few(self, found: Ladder) -> str:
        more = (LEAST_STEPS + self.asked.warming) / (found.steps + found.warm)
        return (
            f"steps are long for --minutes {self.asked.minutes:g}: {found.steps} were measured at "
            f"a time, and the figures are as rough. HINT: --minutes "
            f"{math.ceil(more * found.seconds / MINUTE)}"
        )

    def _fewer(self, found: Ladder, ended: EndedError) -> None:
        """Phases that all fit into a script which ends so early, from now on."""
        most = max(sum(one != LOADER for one in phases) for phases in self.phases.values())
        steps = ended.done // most - found.warm
        if self.asked.steps or steps < FEWEST or steps >= found.steps:
            raise ended
        found.steps = steps
        found.notes = [
            f"the script ends after {ended.done} steps: {steps} are measured at a time, and what "
            "comes later is not seen"
        ]
        for climbs in found.climbs.values():
            climbs.clear()

    def _steps(self, step_s: float) -> int:
        """As many in a phase as the budget allows. Rounds tell more than long phases do, as each
        has processes of its own: as many of them as leave enough of the budget for steps."""
        a_round = sum(phase != LOADER for phases in self.phases.values() for phase in phases)
        left = self.asked.minutes * MINUTE - (time.monotonic() - self.began)
        starts = self.starts_s
        rounds = min(max(int((1 - SHARE) * left / starts), REPETITIONS[0]), REPETITIONS[1])
        each = max((left - rounds * starts) / rounds, SHARE * left / rounds) / a_round
        most = int(each / step_s) - self.asked.warming
        if most >= LEAST_STEPS:
            return in_bursts(min(MOST_STEPS, most), self.workers)
        most = int(self._longest(REPETITIONS[0]) / a_round / step_s)
        few = LEAST_STEPS if most > LEAST_STEPS + self.asked.warming else 2 * most // 3
        return in_bursts(max(FEWEST, few), self.workers)

    def _longest(self, rounds: int) -> float:
        """Seconds that the steps of each of so many rounds may take at most. As long as starting
        does they always may: fewer would spare little."""
        left = OVER * self.asked.minutes * MINUTE - (time.monotonic() - self.began)
        return max(left / rounds - self.starts_s, self.starts_s)

    def _round(self, found: Ladder) -> None:
        """Every rung once: those of one rank, and those of all. Where one fails it is left out
        from now on, and nothing of this round counts."""
        count = len(found.climbs["everything"])
        for alone, phases in self.phases.items():
            left = tuple(one for one in phases if _name(alone, one) not in found.refused)
            if not left:
                continue
            rung = Rung(found.warm, found.steps, left)
            try:
                run = self.runner.run(alone, rung)
            except FailedError as failed:
                number = min(rung.at(failed.steps), len(left) - 1)
                name = _name(alone, left[number])
                if name == "everything":
                    raise
                found.refused |= {_name(alone, one): str(failed) for one in left[number:]}
                for climbs in found.climbs.values():
                    del climbs[count:]
                return
            for phase in left:
                if phase != LOADER:
                    taken = measure_rung(run, rung.first(phase), found.steps, phase)
                    found.climbs[_name(alone, phase)].append(taken)
            if not alone:
                found.run = run
                found.loader = _loader(run) or found.loader

    def _as_in(self, run: Run) -> None:
        """What the first run shows of the script: one rank alone computes with as many threads as
        one of several, and rungs that tell something of it are run, too."""
        self.runner.as_in(run)
        told = [record.meta.get("rung", {}) for record in run.records]
        self.workers = max(one.get("workers", 0) for one in told)
        if any(one.get("threads", 1) > 1 for one in told):
            self.phases[False] = (EVERYTHING, CACHED, SILENT, ONE_THREAD, LOADER)
        if any(one.get("convolutions") and not one.get("channels_last") for one in told):
            self.phases[True] = (EVERYTHING, CACHED, CHANNELS_LAST)


def in_bursts(steps: int, burst: int) -> int:
    """At least so many steps, in whole bursts of not more than BURST: workers that take as long as
    each other give their batches together, and fewer steps have the wait for one, or have none."""
    return math.ceil(steps / burst) * burst if 1 < burst <= BURST else steps


def _name(alone: bool, phase: str) -> str:
    """The rung of a phase."""
    return next((name for name, rung in RUNGS.items() if rung == (alone, phase)), phase)


def _loader(run: Run) -> dict[str, float] | None:
    """What the ranks' loaders made alone, together."""
    told = [record.meta.get("rung", {}).get("loader") for record in run.records]
    known = [one for one in told if one and one["batches"]]
    if not known:
        return None
    return {key: sum(one[key] for one in known) for key in known[0]} | {"ranks": len(known)}
