"""Batches of graphs that are joined to one, as PyTorch Geometric returns them."""

import zlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.observe.facts.ranks import RankFacts
from paceline.observe.facts.samples import BatchFacts
from paceline.observe.generators import saved_generators
from paceline.observe.replays.joined_batches import collate_again, select_samples
from paceline.observe.replays.replay import Part, Replay
from paceline.observe.replays.stored_run import batch_path
from paceline.observe.samples.contents import sample_checksums
from paceline.observe.samples.loaders import OpenPass
from paceline.record.hooks.batch_size import samples_in


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


class Plain:
    def __init__(self, left, right):
        self.left, self.right = left, right


@pytest.mark.parametrize("kind", [Pairs, Plain])
def test_objects_with_tensors_are_batches(kind):
    batch = kind(torch.zeros(5, 2), torch.ones(5))
    assert samples_in(batch) == 5
    assert [len(one) for one in sample_checksums(batch, 5)] == [5, 5]
    assert samples_in((batch, ["a", "b"])) == 5
    assert samples_in([batch, batch, batch]) == 3  # one object for each sample
    assert samples_in(object()) == 1


def test_names_and_numbers_of_a_batch_are_no_samples():
    fields = {"split": "train", "scale": torch.tensor(2.0), "x": torch.zeros(5, 2)}
    assert samples_in(fields) == samples_in(SimpleNamespace(**fields)) == 5
    assert samples_in({"split": "train"}) == 1


@pytest.mark.parametrize("kind", [Pairs, Plain])
def test_objects_that_differ_between_ranks_are_made_again(tmp_path, kind):
    def collate(rows):
        return kind(torch.tensor(rows), torch.tensor(rows) + 0.5)

    assert joined(tmp_path, collate).left.tolist() == [0, 3, 1, 2]
    with pytest.raises(ValueError, match=f"values of type {kind.__name__}"):
        select_samples(collate([0, 1, 2]), [0, 2])


def test_graphs_of_several_ranks_are_joined_as_the_script_does():
    loader = DataLoader(range(5), 2, collate_fn=lambda sizes: Graphs([1 + one for one in sizes]))
    ranks = [[0, 3], [1, 2]]
    parts = [loader.collate_fn(one) for one in ranks]
    whole = collate_again(loader, parts, ranks)
    assert torch.bincount(whole.batch).tolist() == [1, 4, 2, 3]
    other = torch.bincount(collate_again(loader, parts, ranks, seed=1).batch).tolist()
    assert other != [1, 4, 2, 3]
    assert sorted(other) == [1, 2, 3, 4]
    parts[1].x += 1.0
    with pytest.raises(ValueError, match="samples that are read again are others"):
        collate_again(loader, parts, ranks)


def joined(folder, collate, permutes=False):
    """Return the batch of one process for batches of 2 samples of 2 ranks."""
    loader, ranks, facts = DataLoader(range(4), 2, collate_fn=collate), [[0, 3], [1, 2]], []
    for rank, indices in enumerate(ranks):
        path = batch_path(folder, (0, 0, 0), rank)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        torch.save((collate(indices), {}), path)
        facts.append(RankFacts(rank, 2, batches=[BatchFacts(0, 0, 0, 3, indices, [], 0)]))
    replay = Replay.__new__(Replay)
    replay._permutes, replay._evaluations = permutes, SimpleNamespace(ranks=facts)
    replay._observation = SimpleNamespace(facts=RankFacts(0, 1))
    opened = OpenPass(None, None, loader)
    batch = replay._joined(opened, [batch_path(folder, (0, 0, 0), x) for x in (0, 1)], (0, 0, 0))
    assert opened.samples == 4
    assert facts[0].batches[0].used == 2
    return batch


def test_tensors_whose_rows_are_no_samples_are_made_again(tmp_path):
    """Batches with the samples in the second dimension, and of nodes with their graphs."""

    def columns(rows):
        return torch.stack([torch.arange(3) + 10 * one for one in rows], 1)

    def nodes(rows):
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows) + 1)
        return torch.arange(len(owners)).float(), owners

    assert joined(tmp_path, columns).tolist() == columns([0, 3, 1, 2]).tolist()
    assert joined(tmp_path, nodes)[1].tolist() == nodes([0, 3, 1, 2])[1].tolist()
    values, owners = joined(tmp_path, nodes, permutes=True)
    assert owners.tolist() == sorted(owners.tolist())  # no nodes of other graphs
    assert sorted(torch.bincount(owners).tolist()) == [1, 2, 3, 4]
    assert len(values) == 10


def test_parts_whose_rows_are_no_samples_are_not_reordered(tmp_path):
    """Nodes in another order would be other graphs, and their difference no rounding."""
    nodes, owners = torch.arange(5).float(), torch.tensor([0, 0, 1, 1, 1])
    path = batch_path(tmp_path, (0, 0, 0), 0)
    path.parent.mkdir(mode=0o700)
    for batch, samples in (((nodes, owners), 2), ((nodes, nodes), 5)):
        torch.save((batch, saved_generators()), path)
        part = Part(path, (0, 0, 0), 1.0, True, True, samples)
        found = Replay._batch_of(SimpleNamespace(_permutes=True), part, 3)
        assert (found[0].tolist() == nodes.tolist()) is (samples == 2)
