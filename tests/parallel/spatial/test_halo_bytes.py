"""Bytes of halos are those of the formula: rows that a window reads and other ranks hold."""

import random

import torch

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
