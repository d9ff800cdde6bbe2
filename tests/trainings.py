"""Trainings of several ranks in one process, and the facts that ``paceline verify`` would observe.

The ranks train a small network on CPU tensors. Every part can be replaced by one with a mistake.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.analyze.verification.find import judge
from paceline.analyze.verification.mistakes import Finding
from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.models import ModelFacts, ParameterFacts
from paceline.observe.facts.ranks import RankFacts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from paceline.observe.facts.steps import BackwardFacts, ClipFacts, OptimizerFacts, StepFacts
from paceline.observe.observation import SketchTable

FEATURES, HIDDEN = 6, 16
LOADER, LOOP, BACKWARD, STEP, MODEL, OPTIMIZER = (
    f"train.py:{line}" for line in (10, 20, 22, 24, 12, 14)
)
Gradients = dict[str, torch.Tensor]


def mean(ranks: list[Gradients]) -> list[Gradients]:
    """Average the gradients of all ranks."""
    total = {name: sum(one[name] for one in ranks) / len(ranks) for name in ranks[0]}
    return [{name: value.clone() for name, value in total.items()} for _ in ranks]


def total(ranks: list[Gradients]) -> list[Gradients]:
    """Add the gradients of all ranks."""
    return [{name: value * len(ranks) for name, value in one.items()} for one in mean(ranks)]


def own(ranks: list[Gradients]) -> list[Gradients]:
    """Exchange nothing."""
    return ranks


def shuffled(rank: int, size: int, epoch: int, samples: int, seed: int = 0) -> list[int]:
    """Return the samples of a rank as DistributedSampler does."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    order += order[: -samples % size]
    return order[rank::size]


def mean_loss(losses: torch.Tensor, rank: int, size: int, whole: int) -> torch.Tensor:
    return losses.mean()


@dataclass
class Training:
    """What the ranks do.

    Attributes:
        order: Samples of (rank, ranks, epoch); those of DistributedSampler without it.
        root: What the backward starts from, of (losses of the samples, rank, ranks, samples of
            all ranks).
        loss_known: Whether the loss function was seen; it is the mean, or with ``sums`` the sum.
        exchange: Gradients of all ranks to those that the optimizers use.
        hook: Changes the gradients of a rank in its backward, as hooks on parameters do.
        change: Called with (rank, step, gradients after the exchange); returns those it uses.
        after_step: Called with the parameters of all ranks after each step.
        seed: Seed of the model of a rank.
        rate: Learning rate of (rank, ranks, step).
    """

    size: int = 2
    samples: int = 32
    batch: int = 4
    epochs: int = 2
    accumulate: int = 1
    order: Callable[[int, int, int], list[int]] | None = None
    root: Callable[[torch.Tensor, int, int, int], torch.Tensor] = mean_loss
    loss_known: bool = True
    sums: bool = False
    exchange: Callable[[list[Gradients]], list[Gradients]] = mean
    hook: Callable[[Gradients], Gradients] | None = None
    change: Callable[[int, int, Gradients], Gradients] = lambda rank, step, one: one
    after_step: Callable[[list[Gradients]], None] | None = None
    seed: Callable[[int], int] = lambda rank: 0
    rate: Callable[[int, int, int], float] = lambda rank, size, step: 0.1
    clip: float = 0.0
    clip_before: bool = False
    wrapper: str = "DistributedDataParallel"
    sampler: str = "DistributedSampler"
    has_epoch: bool = True
    contents: Callable[[int], int] = lambda at: 1000 + at
    shorter: int = 0  # batches that are run of each epoch; 0: all


class _Rank:
    def __init__(self, asked: Training, rank: int, size: int) -> None:
        generator = torch.Generator().manual_seed(asked.seed(rank))
        make = lambda *shape: torch.randn(*shape, generator=generator) / 2  # noqa: E731
        self.values = {
            "first.weight": make(HIDDEN, FEATURES),
            "first.bias": make(HIDDEN),
            "head.weight": make(3, HIDDEN),
            "head.bias": make(3),
        }
        for one in self.values.values():
            one.requires_grad_()
        self.table = SketchTable()
        self.facts = RankFacts(rank, size, "limit")
        rows = {name: self.table.add(one) for name, one in self.values.items()}
        self.facts.models = [
            ModelFacts(
                *(0, "Net", asked.wrapper, MODEL, False, True),
                [
                    ParameterFacts(n, list(v.shape), "float32", True, v.numel())
                    for n, v in self.values.items()
                ],
                initial=dict(rows),
                first=dict(rows),
            )
        ]
        first_rate = asked.rate(rank, size, 0)
        names = [f"0/{name}" for name in self.values]
        self.facts.optimizers = [OptimizerFacts(0, "SGD", OPTIMIZER, [names], [first_rate])]
        self.loader = LoaderFacts(
            *(0, LOADER, "TensorDataset", asked.samples, 77, False, asked.batch),
            *(asked.sampler, asked.has_epoch, False, 0),
        )
        self.facts.loaders = [self.loader]
        self.backwards: list[BackwardFacts] = []
        self.sum: Gradients = {}

    def rows(self, tensors: Gradients) -> dict[str, int]:
        return {f"0/{name}": self.table.add(one) for name, one in tensors.items()}


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def train(asked: Training, batches: list[list[list[list[int]]]] | None = None) -> list[RankFacts]:
    """Train, and return the facts of all ranks.

    batches: By epoch and step, the samples of each rank; without it from ``order``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slower for tensors as small as these
    try:
        return _train(asked, batches)
    finally:
        torch.set_num_threads(threads)


def _train(asked: Training, batches: list[list[list[list[int]]]] | None) -> list[RankFacts]:
    size = asked.size
    x, y = data(asked.samples)
    ranks = [_Rank(asked, rank, size) for rank in range(size)]
    plan = batches or planned(asked)
    step = 0
    for epoch, epoch_batches in enumerate(plan):
        for one in ranks:
            indices = [each[one.facts.rank] for each in epoch_batches]
            one.loader.passes.append(
                PassFacts(
                    *(epoch, Phase.TRAINING, LOOP, epoch if asked.has_epoch else None, 0, indices),
                    *(False, step),
                )
            )
        run = epoch_batches[: asked.shorter] if asked.shorter else epoch_batches
        for number, each in enumerate(run):
            whole = sum(map(len, each))
            for one, indices in zip(ranks, each, strict=True):
                _backward(asked, one, indices, epoch, number, whole, step, x, y)
            if (number + 1) % asked.accumulate == 0 or number + 1 == len(run):
                _step(asked, ranks, step)
                step += 1
    for one in ranks:
        one.facts.sketches = one.table.array()
    return [one.facts for one in ranks]


def planned(asked: Training) -> list[list[list[list[int]]]]:
    found = []
    for epoch in range(asked.epochs):
        orders = [
            asked.order(rank, asked.size, epoch)
            if asked.order
            else shuffled(rank, asked.size, epoch, asked.samples)
            for rank in range(asked.size)
        ]
        steps = -(-max(map(len, orders)) // asked.batch)
        found.append(
            [
                [one[at * asked.batch : (at + 1) * asked.batch] for one in orders]
                for at in range(steps)
            ]
        )
    return found


def _backward(asked, one, indices, epoch, number, whole, step, x, y) -> None:
    if not indices:
        return
    losses = torch.nn.functional.cross_entropy(
        _forward(one.values, x[indices]), y[indices], reduction="none"
    )
    root = asked.root(losses, one.facts.rank, asked.size, whole)
    loss = losses.sum() if asked.sums else losses.mean()
    found = torch.autograd.grad(root, list(one.values.values()))
    gradients = dict(zip(one.values, found, strict=True))
    raw = {}
    if asked.hook:
        raw, gradients = one.rows(gradients), asked.hook(gradients)
    contents = [[asked.contents(at) for at in indices]]
    one.facts.batches.append(BatchFacts(0, epoch, number, len(indices), indices, contents, step))
    one.backwards.append(
        BackwardFacts(
            *(BACKWARD, 0, [len(one.facts.batches) - 1], root.item()),
            *(loss.item() if asked.loss_known else None, 1.0, True, one.rows(gradients)),
            reduction="sum" if asked.sums else "mean",
            elements=len(indices),
            raw=raw,
        )
    )
    one.sum = {name: one.sum.get(name, 0) + value for name, value in gradients.items()}


def _forward(values: Gradients, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ values["first.weight"].T + values["first.bias"])
    return hidden @ values["head.weight"].T + values["head.bias"]


def _step(asked: Training, ranks: list[_Rank], step: int) -> None:
    clips: list[list[ClipFacts]] = [[] for _ in ranks]

    def clipped(gradients: list[Gradients]) -> list[Gradients]:
        done = []
        for one, mine in zip(ranks, gradients, strict=True):
            norm = float(torch.cat([v.flatten() for v in mine.values()]).norm())
            after = {name: v * min(1.0, asked.clip / norm) for name, v in mine.items()}
            clips[one.facts.rank] = [
                ClipFacts("train.py:23", asked.clip, norm, one.rows(mine), one.rows(after))
            ]
            done.append(after)
        return done

    gradients = [one.sum for one in ranks]
    gradients = clipped(gradients) if asked.clip_before else gradients
    gradients = asked.exchange(gradients)
    gradients = clipped(gradients) if asked.clip and not asked.clip_before else gradients
    for one, mine in zip(ranks, gradients, strict=True):
        rank = one.facts.rank
        used = asked.change(rank, step, mine)
        rate = asked.rate(rank, asked.size, step)
        before = one.rows(one.values)
        with torch.no_grad():
            for name, value in one.values.items():
                value -= rate * used[name]
        one.facts.steps.append(
            StepFacts(
                *(step, 0, STEP, [rate], one.backwards, clips[rank]),
                gradients=one.rows(used),
                parameters=one.rows(one.values),
                before=before,
            )
        )
        one.backwards, one.sum = [], {}
    if asked.after_step:
        with torch.no_grad():
            asked.after_step([one.values for one in ranks])


def verified(asked: Training, with_replay: bool = True) -> VerifyRuns:
    """Return the runs of a verification: all ranks, and the replays on one."""
    ranks = train(asked)
    if not with_replay:
        return VerifyRuns(ranks)
    together = [
        [[[at for rank in step for at in rank]] for step in epoch] for epoch in planned(asked)
    ]
    turned = [[[step[0][::-1]] for step in epoch] for epoch in together]
    single = replace(asked, size=1, batch=asked.batch * asked.size, exchange=mean)
    return VerifyRuns(ranks, train(single, together)[0], train(single, turned)[0])


def find(runs: VerifyRuns) -> list[Finding]:
    """Return what the rules find, none of which fails."""
    found, compared = judge(runs)
    failed = [note for note in compared.notes if note.startswith("the rule ")]
    assert not failed, failed
    return found
