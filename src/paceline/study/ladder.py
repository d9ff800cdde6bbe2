"""The ladder of ``paceline diagnose``: short runs of the user's own script, in each of which
something is switched off from outside (record/rung.py), in turns until the budget is spent."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..analyze.ladder import Climb, climb
from ..analyze.load import Run, load
from ..record.rung import CACHED, EVERYTHING, LOADER, SILENT, VARIABLE, Rung
from ..record.states import State

FIRST_STEPS = 10  # of the run that shows how long a step takes
LEAST_STEPS, MOST_STEPS = 10, 400
REPETITIONS = (3, 9)  # at least, at most
SHARE = 0.6  # of the budget is for steps; the rest for starting
LAST_LINES = 6  # of a run that failed
MINUTE = 60.0
END_SECONDS = 5.0  # for a run that was interrupted to end its ranks

# Rungs by name: whether of one rank alone, and the phase of its run.
RUNGS = {
    "alone": (True, CACHED),
    "alone, loading": (True, EVERYTHING),
    "silent": (False, SILENT),
    "cached": (False, CACHED),
    "everything": (False, EVERYTHING),
}
ALONE, ALL = (EVERYTHING, CACHED), (EVERYTHING, CACHED, SILENT, LOADER)
WORDS = {
    "alone": "one rank, its batch in memory",
    "alone, loading": "one rank, everything",
    "silent": "all ranks, batches in memory, no exchange",
    "cached": "all ranks, batches in memory",
    "everything": "all ranks, everything",
    "loader": "the loaders alone",
}


@dataclass(frozen=True)
class Asked:
    """The script with its arguments as ``paceline run`` has them. options: run's own, of which
    those in ``where`` say how many ranks on which hosts."""

    script: str
    args: list[str]
    where: list[str]
    options: list[str]
    ranks: int | None = None
    minutes: float = 5.0
    steps: int | None = None
    warm: int = 5


@dataclass
class Ladder:
    """What was measured. run: the last one of all ranks, in which everything was on from step
    ``warm`` on. refused: rungs that could not be run, and why."""

    warm: int
    steps: int
    climbs: dict[str, list[Climb]]
    run: Run
    loader: dict[str, float] | None = None
    seconds: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)


def climbed(asked: Asked, say: Callable[[str], None]) -> Ladder:
    """Run the ladder. Raises ValueError where the script itself can't be measured."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="paceline-diagnose-"))
    try:
        return _Climbing(asked, folder, say, began).all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Climbing:
    def __init__(
        self, asked: Asked, folder: Path, say: Callable[[str], None], began: float
    ) -> None:
        self.asked, self.folder, self.say, self.began = asked, folder, say, began
        self.runs = 0
        self.threads: list[str] = []

    def all(self) -> Ladder:
        asked = self.asked
        first = asked.steps or FIRST_STEPS
        before = time.monotonic()
        run = self._run(False, Rung(asked.warm, first, (EVERYTHING,)))
        took = time.monotonic() - before
        known = climb(run, asked.warm, first)
        self._as_in(run)
        start_s = took - (first + asked.warm) * known.step_s
        steps = asked.steps or self._steps(known.step_s, start_s)
        found = Ladder(asked.warm, steps, {name: [] for name in RUNGS}, run)
        limit = asked.minutes * MINUTE
        while len(found.climbs["everything"]) < REPETITIONS[1]:
            turn = time.monotonic()
            self._round(found)
            took, spent = time.monotonic() - turn, time.monotonic() - self.began
            enough = len(found.climbs["everything"]) >= REPETITIONS[0]
            if enough and spent + took > limit:
                break
        found.seconds = time.monotonic() - self.began
        return found

    def _steps(self, step_s: float, start_s: float) -> int:
        """As many in a phase as the budget allows, in the least number of repetitions."""
        runs, phases = 2 * REPETITIONS[0], REPETITIONS[0] * (len(ALONE) + len(ALL) - 1)
        left = self.asked.minutes * MINUTE - (time.monotonic() - self.began)
        each = max(left - runs * start_s, SHARE * left) / phases
        return max(LEAST_STEPS, min(MOST_STEPS, int(each / step_s) - self.asked.warm))

    def _round(self, found: Ladder) -> None:
        """Every rung once: those of one rank, and those of all. Where one fails it is left out
        from now on, and nothing of this round counts."""
        count = len(found.climbs["everything"])
        for alone, phases in ((True, ALONE), (False, ALL)):
            left = tuple(one for one in phases if _name(alone, one) not in found.refused)
            if not left:
                continue
            rung = Rung(found.warm, found.steps, left)
            try:
                run = self._run(alone, rung)
            except _FailedError as failed:
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
                    taken = climb(run, rung.first(phase), found.steps)
                    found.climbs[_name(alone, phase)].append(taken)
            if not alone:
                found.run = run
                found.loader = _loader(run) or found.loader

    def _as_in(self, run: Run) -> None:
        """One rank alone computes with as many threads as one of several."""
        counts = {int(r.meta["threads"]) for r in run.records if "threads" in r.meta}
        if counts and "--threads" not in self.asked.options:
            self.threads = ["--threads", str(min(counts))]

    def _run(self, alone: bool, rung: Rung) -> Run:
        self.runs += 1
        where = _one(self.asked.where) if alone else list(self.asked.where)
        if self.asked.ranks is not None or alone:
            where += ["-n", "1" if alone else str(self.asked.ranks)]
        record = self.folder / f"{self.runs}"
        rung = replace(rung, scratch=str(self.folder / f"scratch-{self.runs}"))
        words = [sys.executable, "-m", "paceline", "run", *where, *self.asked.options]
        words += [*self.threads, "--env", f"{VARIABLE}={rung.variable()}"]
        words += ["--record", str(record), self.asked.script, *self.asked.args]
        who = "one rank" if alone else "all ranks"
        self.say(f"run {self.runs}: {who}, {rung.steps} steps each of: {', '.join(rung.phases)}")
        log = self.folder / f"{self.runs}.log"
        with log.open("w") as file:
            code = _wait(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            )
        run = load(record) if any(record.glob("*.ring")) else None
        stopped = _stopped(run)
        if stopped:
            raise ValueError(f"stopped, as {stopped}. HINT: {_KEPT}")
        if code or run is None:
            steps = min((one.count(State.STEP) for one in run.records), default=0) if run else 0
            last = "".join(f"\n    {line}" for line in _last(log))
            raise _FailedError(f"with {who} the script ended with exit code {code}:{last}", steps)
        return run


class _FailedError(ValueError):
    """A run that failed after so many steps."""

    def __init__(self, text: str, steps: int) -> None:
        super().__init__(text)
        self.steps = steps


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


_KEPT = "files stay as they are while it is diagnosed; give the script another folder for these"


def _one(where: list[str]) -> list[str]:
    """The first of the hosts alone, where hosts are named."""
    found = list(where)
    for at, word in enumerate(where):
        if word == "-H":
            found[at + 1] = where[at + 1].split(",")[0].partition(":")[0] + ":1"
    return found


def _stopped(run: Run | None) -> str:
    told: list[Any] = [record.meta.get("rung", {}) for record in run.records] if run else []
    return next((one["stopped"] for one in told if one.get("stopped")), "")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. With Ctrl-C it ends its ranks first: a terminal has told it, too."""
    try:
        return process.wait()
    except BaseException:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise


def _last(log: Path) -> list[str]:
    said = log.read_text(errors="replace").splitlines()
    lines = [x for x in said if x.strip() and not x.startswith("paceline: the record is in")]
    return lines[-LAST_LINES:] or [f"(no word; {os.fspath(log)})"]
