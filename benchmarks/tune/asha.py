"""Claim: promotion with checkpoints reaches the target of a synthetic benchmark with at most 0.75
of the processor time of Ray Tune's ASHA.

Both schedulers get the same points and the same learning curves, in a simulation of ``WORKERS``
workers: an epoch takes a time that differs between points, and a trial that waits costs nothing.
Processor time is the sum of all epochs until the first trial reaches the target: the best value
among ``TARGET_OF`` random points, after all epochs. Curves cross: points with a large rate learn
fast at first and end worse. Ray's scheduler (``AsyncHyperBandScheduler``) is called without Ray's
actors, so that only its decisions are compared; it stops trials at rungs, and Paceline's pauses
them. Ray runs in the Python of ``--ray-python``, where ray[tune] is installed.
"""

import heapq
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

EPOCHS, ETA, FIRST = 81, 3, 1
WORKERS, POINTS, TARGET_OF = 8, 400, 200
NOISE = 0.01


class Curve:
    """The learning curve of a random point: a loss that falls from 1."""

    def __init__(self, seed: int, number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        self.end = 0.05 + 0.6 * draw.random() ** 0.7  # good points are rare
        # The better the end, the slower: so the first rungs mislead.
        self.rate = 3.0 * (0.3 + draw.random()) * (0.4 + self.end)
        self.noise = [draw.gauss(0.0, NOISE) for _ in range(EPOCHS)]
        self.epoch_s = 0.5 + draw.random()

    def value(self, epoch: int) -> float:
        fall = math.exp(-self.rate * math.sqrt(epoch) / 2)
        return self.end + (1 - self.end) * fall + self.noise[epoch - 1] * fall


class Scheduler(Protocol):
    def next(self) -> tuple[int, int] | None:
        """Return the next trial with the epochs that it has, or None."""

    def report(self, number: int, epoch: int, value: float) -> bool:
        """Return whether the trial continues."""

    def end(self, number: int) -> None:
        """A trial has ended or paused."""


class RayAsha:
    """Ray's AsyncHyperBandScheduler, without Ray's actors."""

    def __init__(self) -> None:
        from ray.tune.experiment import Trial
        from ray.tune.schedulers import AsyncHyperBandScheduler

        self.scheduler = AsyncHyperBandScheduler(
            time_attr="epoch",
            metric="loss",
            mode="min",
            max_t=EPOCHS,
            grace_period=FIRST,
            reduction_factor=ETA,
        )
        self.make, self.trials = Trial, []

    def next(self) -> tuple[int, int] | None:
        if len(self.trials) == POINTS:
            return None
        trial = self.make("function", stub=True)
        self.trials.append(trial)
        self.scheduler.on_trial_add(None, trial)
        return len(self.trials) - 1, 0

    def report(self, number: int, epoch: int, value: float) -> bool:
        result = {"epoch": epoch, "loss": value}
        trial = self.trials[number]
        if epoch >= EPOCHS:
            self.scheduler.on_trial_complete(None, trial, result)
            return False
        return self.scheduler.on_trial_result(None, trial, result) == "CONTINUE"

    def end(self, number: int) -> None:
        pass


class PacelinePromotion:
    """The search of ``pruner = "promotion"``, over a study in memory."""

    def __init__(self, folder: Path, seed: int) -> None:
        import optuna

        from paceline.study.tune.searches.registry import make_search
        from paceline.study.tune.searches.search import Outcome
        from paceline.study.tune.tune import load_spec

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = folder / f"study-{seed}.toml"
        path.write_text(
            f'[study]\ncommand = "t.py {{x}} {{checkpoint}}"\nmetric = "loss"\ngoal = "min"\n'
            f'search = "random"\ntrials = {POINTS}\nepochs = {EPOCHS}\npruner = "promotion"\n'
            f"[pruner]\nfirst = {FIRST}\neta = {ETA}\n[parameters.x]\nlow = 0.0\nhigh = 1.0\n"
        )
        spec = load_spec(path)
        self.study = optuna.create_study(direction="minimize")
        self.search, self.outcome = make_search(self.study, spec), Outcome
        self.works: dict[int, Any] = {}
        self.paused: set[int] = set()

    def next(self) -> tuple[int, int] | None:
        work = self.search.ask(self.search.count < POINTS)
        if work is None:
            return None
        self.works[work.number] = work
        self.search.running.add(work.number)
        known = self.study.get_trials(deepcopy=False)[work.number].intermediate_values
        return work.number, max(known, default=0)

    def report(self, number: int, epoch: int, value: float) -> bool:
        decision = self.search.report(self.works[number], epoch, value)
        if decision == "pause":
            self.paused.add(number)
        if epoch >= EPOCHS:
            self.search.tell(self.works[number], self.outcome("complete", [value]))
        return decision == "continue" and epoch < EPOCHS

    def end(self, number: int) -> None:
        self.search.running.discard(number)


def simulate(scheduler: Scheduler, seed: int, goal: float) -> float:
    """Return the processor time until a trial reaches the goal; all of it if none does."""
    curves: dict[int, Curve] = {}
    clock, used, order = 0.0, 0.0, 0
    busy: list[tuple[float, int, int, int]] = []  # end, order, trial, epoch
    while True:
        while len(busy) < WORKERS and (found := scheduler.next()) is not None:
            number, epoch = found
            curve = curves.setdefault(number, Curve(seed, number))
            order += 1
            heapq.heappush(busy, (clock + curve.epoch_s, order, number, epoch + 1))
        if not busy:
            return used
        clock, _, number, epoch = heapq.heappop(busy)
        curve = curves[number]
        used += curve.epoch_s
        if curve.value(epoch) <= goal:
            return used
        if scheduler.report(number, epoch, curve.value(epoch)):
            order += 1
            heapq.heappush(busy, (clock + curve.epoch_s, order, number, epoch + 1))
        else:
            scheduler.end(number)


def goal_of(seed: int) -> float:
    return min(Curve(seed, number).value(EPOCHS) for number in range(TARGET_OF))


def measure(which: str, seeds: int) -> list[float]:
    found = []
    with tempfile.TemporaryDirectory(prefix="asha-") as name:
        for seed in range(seeds):
            scheduler: Scheduler = (
                RayAsha() if which == "ray" else PacelinePromotion(Path(name), seed)
            )
            found.append(simulate(scheduler, seed, goal_of(seed)))
    return found


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common import console, finish, options, ratio, spread, target

    parser = options("asha", __doc__ or "", repeats=40)
    parser.add_argument("--ray-python", required=True, help="Python with ray[tune]")
    args = parser.parse_args()
    words = [args.ray_python, __file__, "--measure", "ray", str(args.repeats)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    measured = {
        "paceline_s": measure("paceline", args.repeats),
        "ray_s": json.loads(done.stdout.splitlines()[-1]),
    }
    found = ratio(measured["paceline_s"], measured["ray_s"])
    console.print(f"processor time, Paceline to Ray: {found}")
    finish(
        args,
        measured,
        {name: spread(values) for name, values in measured.items()},
        {"paceline to ray": found},
        [
            target(
                "promotion needs at most 0.75 of the processor time of Ray's ASHA",
                0.75,
                found,
            )
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
