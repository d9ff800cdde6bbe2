"""Bytes of halos are those of the formula: rows that a window reads and other ranks hold."""

import random
import threading
from collections import defaultdict

import thread_ranks
import torch
from torch import nn

from paceline.parallel.spatial import exchange
from paceline.parallel.spatial.exchange import Fetch, Line
from paceline.parallel.spatial.partition import Partition, window, windows_of


def test_bytes_of_halos_are_the_rows_of_others_that_the_outputs_read(monkeypatch):
    sent, came = [], []

    class NoTransfer:
        def __init__(self, outgoing, incoming, line, layer):
            sent.append(sum(one.nbytes for one in outgoing.values()))
            came.append(sum(one.nbytes for one in incoming.values()))

    monkeypatch.setattr(exchange, "Transfer", NoTransfer)
    r, most = random.Random(5), 0
    for _ in range(300):
        ranks, kernel, stride = r.randint(1, 5), r.randint(1, 6), r.randint(1, 4)
        dilation, padding = r.randint(1, 3), r.randint(0, 4)
        rows = r.randint(max(ranks, dilation * (kernel - 1) + 1), 40)
        outputs = (rows + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        have = Partition.even("depth", rows, ranks)
        parts = have.scaled(outputs).parts()
        asked = [windows_of(one, kernel, stride, padding, dilation) for one in parts]
        windows = tuple(window(first, end, rows) for first, end in asked)
        bytes_of_row = 2 * 3 * 7 * 4  # samples, channels, other dims, float32
        expected = 0
        for place, (first, end) in enumerate(parts):
            a, b = have.part(place)
            read = range(first * stride - padding,
                         (end - 1) * stride - padding + dilation * (kernel - 1) + 1)  # fmt: skip
            halo = [at for at in read if 0 <= at < rows and not a <= at < b] if first < end else []
            expected += len(halo) * bytes_of_row
            plan = Fetch(2, have, windows, Line(None, tuple(range(ranks)), place))
            plan.start(torch.zeros(2, 3, b - a, 7))
            assert came.pop() == len(halo) * bytes_of_row
            plan.start_back(torch.zeros(2, 3, plan.length, 7))
            most = max(most, sent.pop())
            assert came.pop() == sent[-1]  # gradients of the rows that were sent come back
        assert sum(sent) == expected
        sent.clear()
    assert most > 0


LAYERS = {
    "convolution": nn.Conv3d(2, 3, 3, padding=1),
    "even kernel": nn.Conv3d(2, 3, (3, 3, 4), padding="same"),
    "maximum": nn.MaxPool3d(3, 1, 1),
    "mean": nn.AvgPool3d(3, 1, 1),
    "border": nn.ConstantPad3d(1, 2.0),
}


def test_no_padding_travels_where_several_axes_are_divided(monkeypatch):
    """A rank receives the positions of its windows less those of its part, and as many back."""
    received = defaultdict(int)  # by thread

    def add(layer, size, waited):
        received[threading.get_ident()] += size

    monkeypatch.setattr(exchange.halo_totals, "add", add)
    x = torch.randn(1, 2, 5, 6, 4)

    def train(world):
        world.distribute(nn.Conv3d(1, 1, 1), layout="d2 x h2", compare=False)
        sizes = {}
        for name, layer in LAYERS.items():
            part = world.part(x)
            part.local.requires_grad_()
            before = received[threading.get_ident()]
            found = layer(part)
            found.local.sum().backward()
            sizes[name] = received[threading.get_ident()] - before
            torch.testing.assert_close(world.whole(found), layer(x))
        return sizes

    found = thread_ranks.run(train, 4)
    parts = [(d, h) for d in (2, 3) for h in (3, 3)]
    halos = sum((d + 1) * (h + 1) - d * h for d, h in parts)
    expected = 2 * halos * 2 * 4 * 4  # both ways, channels, width, float32
    for name in LAYERS:
        total = sum(sizes[name] for sizes in found)
        assert total == (0 if name == "border" else expected), name
