"""One training with a batch and an optimizer, for benchmarks/large_batch/convergence.py.

One process stands for all ranks of a job, with the global batch. The same training runs on ranks
(its result is the same: tests/optim/test_large_batches.py):

    paceline run -n 4 benchmarks/scripts/large_batch/training.py \\
        '{"optimizer": "lars", "batch": 1024, "lr": 0.3}'
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parent))
from tasks import Task, build_model, load_task

import paceline
from paceline.optim import LAMB, LARS
from paceline.optim.large_batches import scale_learning_rate

REFERENCE_BATCH = 32
OPTIMIZERS: dict[str, Callable[[Any, float, float], Optimizer]] = {
    "sgd": lambda p, lr, decay: SGD(p, lr, weight_decay=decay),
    "nesterov": lambda p, lr, decay: SGD(p, lr, 0.9, weight_decay=decay, nesterov=True),
    "lars": lambda p, lr, decay: LARS(p, lr, 0.9, weight_decay=decay),
    "adamw": lambda p, lr, decay: AdamW(p, lr, weight_decay=decay),
    "lamb": lambda p, lr, decay: LAMB(p, lr, weight_decay=decay),
}


@dataclass(frozen=True)
class Settings:
    """One training. ``lr`` belongs to REFERENCE_BATCH: the rule scales it to ``batch``."""

    optimizer: str
    batch: int
    lr: float
    warmup: float = 0.0  # share of the steps
    weight_decay: float = 0.0
    seed: int = 0
    epochs: int = 4
    task: str = "words"
    model: str = "batch"
    rule: str = "linear"


def train(settings: Settings, world: paceline.World | None = None) -> dict[str, Any]:
    """Train; return validation losses and errors after each epoch, and the test error.

    Errors are None if the training diverged.
    """
    task = load_task(settings.task)
    torch.manual_seed(settings.seed)
    model = build_model(settings.task, settings.model)
    optimizer = OPTIMIZERS[settings.optimizer](
        model.parameters(), settings.lr, settings.weight_decay
    )
    steps = settings.epochs * (len(task.train) // settings.batch)
    scheduler = scale_learning_rate(
        optimizer,
        global_batch=settings.batch,
        reference_batch=REFERENCE_BATCH,
        rule=settings.rule,
        warmup=round(settings.warmup * steps),
        decay="linear",
        steps=steps,
    )
    assert scheduler is not None
    if world is not None:
        norm = "sync" if settings.model == "batch" else "local"
        model, optimizer = world.distribute(model, optimizer, norm=norm)
    losses: list[float] = []
    curve: list[float | None] = []
    for epoch in range(settings.epochs):
        for rows in batches(task, settings, epoch):
            mine = rows if world is None else rows.chunk(world.size)[world.rank]
            loss = task.loss(model(task.train.x[mine]), task.train.y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        judged, error = task.error(model, task.validation)
        if not math.isfinite(judged):
            curve += [None] * (settings.epochs - len(curve))
            return {"losses": losses, "curve": curve, "validation": None, "test": None}
        losses.append(judged)
        curve.append(error)
    test = task.error(model, task.test)[1]
    return {"losses": losses, "curve": curve, "validation": curve[-1], "test": test}


def batches(task: Task, settings: Settings, epoch: int) -> Iterator[torch.Tensor]:
    """Yield the rows of each full batch of an epoch."""
    order = torch.Generator().manual_seed(1000 * settings.seed + epoch)
    rows = torch.randperm(len(task.train), generator=order)
    yield from rows[: len(rows) // settings.batch * settings.batch].split(settings.batch)


def main() -> None:
    world = paceline.init()
    for text in sys.argv[1:]:
        settings = Settings(**json.loads(text))
        found = train(settings, world if world.size > 1 else None)
        if world.rank == 0:
            print(json.dumps({**asdict(settings), **found}), flush=True)


if __name__ == "__main__":
    main()
