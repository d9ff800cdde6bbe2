"""Claim: population-based training reaches a lower test loss than the best fixed schedule at the
same budget, on a small real problem (handwritten digits with wrong labels), with five seeds.

Each arm trains ``MEMBERS`` models for ``EPOCHS`` epochs, and is measured on the test images by the
model that has the lowest loss on the validation images. Fixed schedules: the learning rate and the
weight decay of each model are drawn at random; the rate is constant, falls by a cosine, or falls to
a tenth after half and three quarters of the epochs. The best fixed schedule is the one of these
three with the lowest mean test loss, so it is chosen with more knowledge than a user has. Members
of the population begin with the same random points and a constant rate.

The search is Paceline's; the models are trained in this process.
"""

import copy
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, options, ratio, run, spread, target
from rich.table import Table

from paceline.study.tune.searches.registry import make_search
from paceline.study.tune.searches.search import Outcome
from paceline.study.tune.tune import load_spec

MEMBERS, EPOCHS, EVERY = 8, 40, 4
LR, DECAY = (3e-3, 1.0), (1e-5, 1e-1)
WRONG_LABELS = 0.1
BATCH = 32
SCHEDULES = {
    "constant": lambda epoch: 1.0,
    "cosine": lambda epoch: (1 + math.cos(math.pi * epoch / EPOCHS)) / 2,
    "steps": lambda epoch: 0.1 ** ((2 * epoch >= EPOCHS) + (4 * epoch >= 3 * EPOCHS)),
}
STUDY = f"""
[study]
command = "train.py {{lr}} {{decay}} {{epochs}} {{checkpoint}}"
metric = "loss"
goal = "min"
epochs = {EPOCHS}
trials = {MEMBERS * EPOCHS // EVERY}
search = "random"
pruner = "population"
seed = SEED
[pruner]
size = {MEMBERS}
every = {EVERY}
[parameters.lr]
low = {LR[0]}
high = {LR[1]}
log = true
[parameters.decay]
low = {DECAY[0]}
high = {DECAY[1]}
log = true
"""


class Data:
    """Images and labels to train, to validate and to test; some training labels are wrong."""

    def __init__(self, seed: int) -> None:
        bunch = load_digits()
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(bunch.target), generator=draw)
        images = torch.tensor(bunch.images, dtype=torch.float32).flatten(1)[order] / 16
        labels = torch.tensor(bunch.target)[order]
        wrong = torch.rand(900, generator=draw) < WRONG_LABELS
        others = torch.randint(0, 10, (900,), generator=draw)
        self.train = images[:900], torch.where(wrong, others, labels[:900])
        self.validation = images[900:1350], labels[900:1350]
        self.test = images[1350:], labels[1350:]


class Model:
    """A small network with its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10)]
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=0.9)

    def epoch(self, data: Data, seed: int, lr: float, decay: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, decay
        images, labels = data.train
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        for at in order.split(BATCH):
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.net(images[at]), labels[at]).backward()
            self.optimizer.step()

    @torch.no_grad()
    def loss(self, part: tuple[torch.Tensor, torch.Tensor]) -> float:
        found = float(torch.nn.functional.cross_entropy(self.net(part[0]), part[1]))
        return found if math.isfinite(found) else 1e3


def drawn(seed: int) -> list[tuple[float, float]]:
    draw = random.Random(seed)

    def log(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    return [(log(*LR), log(*DECAY)) for _ in range(MEMBERS)]


def fixed(data: Data, seed: int, schedule: Any) -> float:
    """Return the test loss of the best of the models with a fixed schedule."""
    found = []
    for member, (lr, decay) in enumerate(drawn(seed)):
        model = Model(100 * seed + member)
        for epoch in range(EPOCHS):
            model.epoch(data, 1000 * seed + epoch, lr * schedule(epoch), decay)
        found.append((model.loss(data.validation), model.loss(data.test)))
    return min(found)[1]


def population(data: Data, seed: int, folder: Path) -> float:
    """Return the test loss of the best model of a population."""
    path = folder / f"study-{seed}.toml"
    known = "".join(f"[[known]]\nlr = {lr!r}\ndecay = {decay!r}\n" for lr, decay in drawn(seed))
    path.write_text(STUDY.replace("SEED", str(seed)) + known)
    spec = load_spec(path)
    study = optuna.create_study(direction="minimize")
    for point in spec.known:
        study.enqueue_trial(dict(point))
    search = make_search(study, spec)
    models: dict[int, Model] = {}
    while (work := search.ask(True)) is not None:
        first = search.first_step(study.trials[work.number])
        parent = work.checkpoint_of
        model = (
            copy.deepcopy(models[parent]) if parent is not None else Model(100 * seed + work.number)
        )
        models[work.number] = model
        state = "complete"
        for epoch in range(first, min(first + EVERY, EPOCHS)):
            model.epoch(data, 1000 * seed + epoch, work.values["lr"], work.values["decay"])
            if search.report(work, epoch + 1, model.loss(data.validation)) == "pause":
                state = "paused"
        search.tell(work, Outcome(state, [model.loss(data.validation)]))  # type: ignore[arg-type]
    best = min(models, key=lambda number: (models[number].loss(data.validation), number))
    return models[best].loss(data.test)


def main() -> None:
    parser = options("population", __doc__ or "", repeats=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    measured: dict[str, list[float]] = {name: [] for name in ("population", *SCHEDULES)}
    with tempfile.TemporaryDirectory(prefix="population-") as name:
        for seed in range(args.repeats):
            data = Data(seed)
            for schedule, of in SCHEDULES.items():
                measured[schedule].append(fixed(data, seed, of))
            measured["population"].append(population(data, seed, Path(name)))
    best = min(SCHEDULES, key=lambda one: statistics.fmean(measured[one]))
    headings = ("arm", "mean", "seeds")
    table = Table(*headings, title=f"Test loss, {args.repeats} seeds; best fixed schedule: {best}")
    for arm, values in measured.items():
        shown = ", ".join(f"{value:.4f}" for value in values)
        table.add_row(arm, f"{statistics.fmean(values):.4f}", shown)
    console.print(table)
    ratios = {one: ratio(measured["population"], measured[one]) for one in SCHEDULES}
    finish(
        args,
        measured,
        {one: spread(values) for one, values in measured.items()},
        ratios,
        [
            target(
                f"a population has a lower test loss than the best fixed schedule ({best})",
                1.0,
                ratios[best],
            )
        ],
    )


if __name__ == "__main__":
    run(main)
