"""Batches of graphs that are joined to one, as PyTorch Geometric returns them."""

import zlib
from dataclasses import dataclass

import torch

from paceline.record.hooks.batch_size import samples_in
from paceline.record.training.samples.contents import sample_checksums


class Graphs:
    """Has the attributes of ``torch_geometric.data.Batch``."""

    def __init__(self, sizes, start=0.0):
        self.x = torch.arange(sum(sizes), dtype=torch.float32)[:, None] + start
        self.edge_index = torch.zeros(2, 3 * len(sizes), dtype=torch.long)
        self.y = torch.zeros(len(sizes), dtype=torch.long)
        self.batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.num_graphs = len(sizes)

    def to_dict(self):
        return {name: value for name, value in vars(self).items() if name != "num_graphs"}


@dataclass
class Pairs:
    left: torch.Tensor
    right: torch.Tensor


def test_graphs_are_counted_and_not_their_nodes_or_batches():
    batch = Graphs([3, 1, 4])
    assert samples_in(batch) == 3
    assert samples_in((batch, torch.zeros(3))) == 3
    nodes, labels = sample_checksums(batch, 3)
    assert labels == [zlib.crc32(bytes(8))] * 3
    parts = [batch.x[:3], batch.x[3:4], batch.x[4:]]
    assert nodes == [zlib.crc32(one.numpy().tobytes()) for one in parts]
    (same, _), (other, _) = (sample_checksums(Graphs([3], start), 1) for start in (0.0, 1.0))
    assert same == nodes[:1] != other


def test_objects_with_tensors_are_batches():
    batch = Pairs(torch.zeros(5, 2), torch.ones(5))
    assert samples_in(batch) == 5
    assert [len(one) for one in sample_checksums(batch, 5)] == [5, 5]
    assert samples_in(object()) == 1
