"""Steps to a loss with other batches: predicted from the gradient noise scale, and measured.

Trainings with REFERENCE samples a batch give the noise scale, by Paceline's estimate, and their
number of steps. From both follows the number of steps with the other batches. Each batch has its
own learning rate, which a search finds, as the law needs it (McCandlish et al., arXiv 1812.06162).
"""

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from kept_runs import KeptRuns
from noise import steps_to

from paceline.analyze.figures.noise_scale import NoiseScale, estimate_noise_scale

REFERENCE = 64
SEEDS = 5
FACTOR = 2.0  # between two learning rates of the search


@dataclass(frozen=True)
class Case:
    """A model, and the loss that it is to reach."""

    task: str
    model: str
    target: float
    lr: float  # at which the search for REFERENCE begins
    batches: tuple[int, ...]
    most_steps: int


CASES = (
    Case("words", "layer", 1.6, 0.4, (16, 32, 256, 1024), 6000),
    Case("digits", "cnn", 0.2, 0.4, (8, 16, 256, 1024), 6000),
    Case("molecules", "layer", 0.1, 0.4, (16, 32, 256, 1024), 6000),
)

QUICK = (Case("digits", "cnn", 2.2, 0.2, (128,), 200),)


def predict(runs: KeptRuns, cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    """Return for each case the noise scale, and the steps of each batch with their prediction."""
    return [_of_case(runs, case) for case in cases]


def _of_case(runs: KeptRuns, case: Case) -> dict[str, Any]:
    lr, found = _tuned(runs, case, REFERENCE, case.lr, case.most_steps)
    noise = _noise_scale(found)
    reference = [one["steps"] for one in found]
    rows = [{"batch": REFERENCE, "lr": lr, "measured": reference}]
    for side in (-1, 1):
        start, near, steps = lr, REFERENCE, max(reference)
        others = [batch for batch in case.batches if (batch - REFERENCE) * side > 0]
        for batch in sorted(others, reverse=side < 0):
            limit = round(2 * steps * max(near / batch, 1))  # the law has at most half of them
            start, measured = _tuned(runs, case, batch, start * (batch / near) ** 0.5, limit)
            near, steps = batch, max(one["steps"] for one in measured)
            row = {"batch": batch, "lr": start, "measured": [one["steps"] for one in measured]}
            rows.append(row | _predicted(noise, reference, batch, row["measured"]))
    return {
        "task": case.task,
        "model": case.model,
        "target": case.target,
        "noise_scale": {"samples": noise.samples, "low": noise.low, "high": noise.high},
        "fitted": _fitted(rows),
        "rows": sorted(rows, key=lambda row: row["batch"]),
    }


def _predicted(
    noise: NoiseScale, reference: list[float], batch: int, measured: list[float]
) -> dict[str, Any]:
    """Return the predicted steps with their band, and whether it holds the measured median."""
    shares = [
        (1 + scale / batch) / (1 + scale / REFERENCE) if scale is not None else REFERENCE / batch
        for scale in (noise.low, noise.high)  # without an upper end: each doubling halves the steps
    ]
    if noise.samples is None:
        return {"predicted": None, "low": None, "high": None, "is_inside": False}
    low, high = min(shares) * min(reference), max(shares) * max(reference)
    share = noise.steps_with(batch)
    assert share is not None
    return {
        "predicted": share * statistics.median(reference),
        "low": low,
        "high": high,
        "is_inside": low <= statistics.median(measured) <= high,
    }


def _tuned(
    runs: KeptRuns, case: Case, batch: int, start: float, limit: int
) -> tuple[float, list[dict[str, Any]]]:
    """Return the learning rate with the fewest steps, and its trainings with other seeds."""
    best_lr, best = start, _steps(runs, case, batch, start, limit)
    while best == float("inf"):  # diverged
        best_lr = _lower(best_lr, case, batch)
        best = _steps(runs, case, batch, best_lr, limit)
    for way in (FACTOR, 1 / FACTOR):
        lr = best_lr * way
        while (steps := _steps(runs, case, batch, lr, best)) < best:
            best_lr, best, lr = lr, steps, lr * way
    while True:
        seeds = range(1, 1 + SEEDS)
        found = [_run(runs, case, batch, best_lr, seed, limit) for seed in seeds]
        if all(one["steps"] is not None for one in found):
            return best_lr, found
        best_lr = _lower(best_lr, case, batch)  # this one is too near to those that diverge


def _lower(lr: float, case: Case, batch: int) -> float:
    if lr < 1e-4:
        raise SystemExit(f"{case}: no learning rate reaches the target with batch {batch}")
    return lr / FACTOR


def _steps(runs: KeptRuns, case: Case, batch: int, lr: float, limit: float) -> float:
    steps = _run(runs, case, batch, lr, 0, limit)["steps"]
    return float("inf") if steps is None else float(steps)


def _run(
    runs: KeptRuns, case: Case, batch: int, lr: float, seed: int, limit: float
) -> dict[str, Any]:
    where: dict[str, Any] = {"task": case.task, "model": case.model, "target": case.target}
    where |= {"batch": batch, "has_norms": batch == REFERENCE and seed > 0}
    found: dict[str, Any] = runs(steps_to, **where, lr=lr, seed=seed, limit=limit)
    return found


def _noise_scale(found: list[dict[str, Any]]) -> NoiseScale:
    """Return the noise scale of all sampled steps of all trainings."""
    steps = [of_step for one in found for of_step in one["norms"]]
    ranks = [
        {
            number: (int(step[rank][0]), step[rank][1], step[rank][2])
            for number, step in enumerate(steps)
        }
        for rank in range(len(steps[0]))
    ]
    noise = estimate_noise_scale(ranks)
    assert noise is not None
    return noise


def _fitted(rows: list[dict[str, Any]]) -> float | None:
    """Return the noise scale that fits the measured steps, ``S = S_min (1 + B / batch)``."""
    batches = np.array([row["batch"] for row in rows], float)
    steps = np.array([statistics.median(row["measured"]) for row in rows])
    terms = np.stack([np.ones_like(batches), 1 / batches], axis=1) / steps[:, None]
    (least, slope), *_ = np.linalg.lstsq(terms, np.ones_like(steps), rcond=None)
    return float(slope / least) if least > 0 and slope > 0 else None
