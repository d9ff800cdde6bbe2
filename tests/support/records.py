"""Synthetic records with known results (times are in milliseconds), and losses of trainings."""

import numpy as np

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import Run
from paceline.analyze.records.read_record import parse_record
from paceline.analyze.reference.metric import Metric
from paceline.analyze.reference.series import Reference, Series
from paceline.record.ring.ring import Ring
from paceline.record.ring.states import Op, State
from paceline.report.report_command import make_report

MS = 1_000_000


class Rank:
    """The record of one rank.

    ``groups`` maps the name of a process group to its size and this rank's number in it.
    """

    def __init__(self, folder, rank, size, host="host", groups=None, **meta):
        known = {"rank": rank, "size": size, "host": host, "started_ns": 0, **meta}
        groups = groups or {"0": (size, rank)}
        known["groups"] = {
            str(i + 1): {"name": name, "size": n, "rank": own}
            for i, (name, (n, own)) in enumerate(groups.items())
        }
        self.number = {name: i + 1 for i, name in enumerate(groups)}
        self.path = folder / f"rank-{rank}.ring"
        self.ring = Ring(self.path, known, capacity=8192)
        self.seq = dict.fromkeys(groups, 0)

    def was(self, state, start, end, **fields):
        self.ring.write(round(start * MS), round(end * MS), state, **fields)

    def collective(self, launched, blocked, end, op=Op.ALL_REDUCE, peer=-1, amount=0, group="0"):
        self.seq[group] += 1
        self._exchange(launched, blocked, end, op, peer, amount, group, self.seq[group])

    def message(self, launched, blocked, end, op, peer, number, amount=0, group="0"):
        self._exchange(launched, blocked, end, op, peer, amount, group, number)

    def _exchange(self, launched, blocked, end, op, peer, amount, group, seq):
        fields = {"seq": seq, "group": self.number[group], "op": op, "peer": peer}
        self.was(State.BLOCKED, blocked, end, amount=amount, **fields)
        self.was(State.COLLECTIVE, launched, end, amount=amount, **fields)

    def step(self, start, end, samples=0, number=0):
        self.was(State.STEP, start, end, amount=samples, step=number)

    def record(self):
        return parse_record(self.ring.snapshot())


def report_of(ranks, **options):
    """Return the report of synthetic ranks."""
    return analyse(Run("test", [rank.record() for rank in ranks], missing=[]), **options)


def made(folder, size=2, steps=40, compute=20.0, run="a", host="node", samples=8, **meta):
    """Write the records of ``size`` ranks; the last one computes 10 ms longer in each step."""
    folder.mkdir(parents=True)
    for i in range(size):
        rank = Rank(folder, i, size, host=f"{host}{i // 2}", clock="one", run=run, **meta)
        rank.step(0, 10)
        for step in range(steps):
            begin = 10 + step * (compute + 20) + step % 3
            arrived = begin + compute + (10 if i == size - 1 and size > 1 else 0)
            rank.was(State.FORWARD, begin, arrived)
            if size > 1:
                rank.collective(arrived, arrived, begin + compute + 15, amount=1 << 20)
            rank.step(begin, begin + compute + 15, samples=samples, number=step + 1)
    return folder


LOSS_BATCH = 32


def healthy_losses(seed: int, count: int = 500, correlation: float = 0.0) -> np.ndarray:
    """Return a loss that falls from 2.3 to 0.3, with noise and an offset of its own."""
    draw = np.random.default_rng(seed)
    step = np.arange(1, count + 1)
    curve = 0.3 + 2 * np.exp(-step / (60 * draw.normal(1, 0.04)))
    noise = draw.normal(size=count)
    for i in range(1, count):
        noise[i] = correlation * noise[i - 1] + (1 - correlation**2) ** 0.5 * noise[i]
    return curve + draw.normal(0, 0.01) + noise * noise_of_loss(curve)


def noise_of_loss(curve: np.ndarray) -> np.ndarray:
    return 0.02 + 0.05 * curve


def loss_series(values: np.ndarray, samples: bool = True) -> Series:
    steps = np.arange(1.0, len(values) + 1)
    unknown = np.full(len(values), np.nan)
    seen = LOSS_BATCH * steps if samples else np.zeros(len(values))
    return Series(steps, seen, np.asarray(values, float), unknown, unknown)


def loss_reference(seeds=(0, 1, 2), **options) -> Reference:
    return Reference(Metric(), [loss_series(healthy_losses(seed, **options)) for seed in seeds])


def report_text(folders, steps=None, **options):
    """Return the text of ``paceline report``."""
    return make_report(folders, steps, **options).text
