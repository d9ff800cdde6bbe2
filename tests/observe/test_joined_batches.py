"""Batches of several ranks as one, and with their samples in another order."""

import collections

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.observe.facts.ranks import RankFacts, write_facts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from paceline.observe.replays.joined_batches import (
    collate_again,
    join_batches,
    permute_batch,
)
from paceline.observe.replays.replay import Evaluations, keep_all_results
from paceline.observe.replays.stored_run import batch_path
from paceline.observe.samples.contents import row_checksums

Pair = collections.namedtuple("Pair", "x y")


def test_batches_of_different_sizes_are_joined_in_order():
    one = {"x": torch.arange(6).reshape(3, 2), "name": ["a", "b", "c"], "scale": 2.0}
    other = {"x": torch.arange(6, 10).reshape(2, 2), "name": ["d", "e"], "scale": 2.0}
    joined = join_batches([one, other])
    assert torch.equal(joined["x"], torch.arange(10).reshape(5, 2))
    assert joined["name"] == list("abcde")
    assert joined["scale"] == 2.0


def test_global_batch_that_each_rank_reads_is_not_doubled():
    whole = [{"x": torch.arange(8).reshape(4, 2), "name": list("abcd")}, torch.ones(4)]
    again = [{"x": torch.arange(8).reshape(4, 2), "name": list("abcd")}, torch.ones(4)]
    assert len(join_batches([whole, again])[1]) == 4
    again[0]["name"] = list("abce")
    assert len(join_batches([whole, again])[1]) == 8


def test_type_of_containers_is_kept():
    joined = join_batches(
        [Pair(torch.zeros(2, 3), torch.zeros(2)), Pair(torch.ones(2, 3), torch.ones(2))]
    )
    assert isinstance(joined, Pair)
    assert joined.x.shape == (4, 3)
    assert isinstance(join_batches([[torch.zeros(2)], [torch.ones(2)]]), list)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [{"x": torch.zeros(2), "kind": "a"}, {"x": torch.zeros(2), "kind": "b"}],
    ],
)
def test_batches_that_do_not_fit_are_refused(batches):
    with pytest.raises(ValueError, match=r"tensors of shapes|values of type"):
        join_batches(batches)


class Words(torch.utils.data.Dataset):
    """Sequences of other lengths."""

    def __getitem__(self, at):
        return {"x": torch.arange(at + 1) + 0.5 * self.noise(), "y": at}

    def noise(self):
        return 0

    def collate(self, samples):
        rows = [one["x"] for one in samples]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        return collections.UserDict(x=padded, y=torch.tensor([one["y"] for one in samples]))


def test_padded_batches_are_made_again_for_all_samples():
    words = Words()
    loader = DataLoader(words, 2, collate_fn=words.collate, sampler=range(5))
    parts = [words.collate([words[at] for at in rows]) for rows in ([0, 3], [1, 2])]
    with pytest.raises(ValueError, match="tensors of shapes"):
        join_batches(parts)
    whole = collate_again(loader, parts, [[0, 3], [1, 2]])
    assert whole["y"].tolist() == [0, 3, 1, 2]
    assert whole["x"].tolist()[2] == [0, 1, -1, -1]
    for wrong in ([[0, 3], [1, 4]], [[0, 3], None], [[0, 3], [1, 9.5]]):
        with pytest.raises(ValueError, match="they can't be made again"):
            collate_again(loader, parts, wrong)


def test_samples_that_are_drawn_again_are_not_made_again():
    words = Words()
    words.noise = lambda: torch.rand(1)
    loader = DataLoader(words, 2, collate_fn=words.collate, sampler=range(5))
    parts = [words.collate([words[at] for at in rows]) for rows in ([0, 3], [1, 2])]
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="samples that are read again are others"):
        collate_again(loader, parts, [[0, 3], [1, 2]])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_permuted_batch_has_the_same_pairs():
    x = torch.arange(8.0).reshape(8, 1)
    batch = [x, x[:, 0] * 10, [f"{i}" for i in range(8)]]
    inputs, labels, names = permute_batch(batch, 3)
    assert not torch.equal(inputs, x)
    assert torch.equal(inputs[:, 0] * 10, labels)
    assert [float(name) for name in names] == inputs[:, 0].tolist()
    assert sorted(inputs[:, 0].tolist()) == x[:, 0].tolist()


class Made:
    """Loaders of one line."""

    def __init__(self):
        self.keys = {}

    def line_of(self, loader):
        return "train.py:9"


def stored(folder, rank, batches, key=0):
    """Store the evaluation of a rank: batches of (position, value)."""
    loader = LoaderFacts(key, "train.py:9", "D", 9, 0, False, 2, "", False, False, 0)
    planned = [[at for at, _ in batch] for batch in batches]
    loader.passes = [
        PassFacts(0, Phase.EVALUATION, "train.py:20", None, len(batches), planned, True, 4)
    ]
    facts = RankFacts(rank, 2, "limit", loaders=[loader])
    for number, batch in enumerate(batches):
        positions, values = [at for at, _ in batch], torch.tensor([x for _, x in batch])
        checksums = [row_checksums(values)]
        facts.batches.append(BatchFacts(key, 0, number, len(batch), positions, checksums, 4))
        path = batch_path(folder, (key, 0, number), rank)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        torch.save((values, {}), path)
    write_facts(folder, facts)


@pytest.mark.parametrize(
    ("other", "joined"),
    [
        ([[(1, 1.0), (3, 3.0)], [(0, 0.0)]], [[0, 2, 1, 3], [4]]),  # a sampler has added sample 0
        ([[(0, 0.0), (2, 2.0)], [(4, 4.0)]], [[0, 2], [4]]),  # all ranks evaluate all samples
        ([[(0, 9.0), (2, 8.0)], [(4, 7.0)]], [[0, 2, 9, 8], [4, 7]]),  # parts of their own
        ([[(1, 1.0), (3, 3.0)]], [[0, 2, 1, 3], [4]]),
    ],
)
def test_evaluations_of_ranks_are_joined_with_each_sample_once(tmp_path, other, joined):
    stored(tmp_path, 0, [[(0, 0.0), (2, 2.0)], [(4, 4.0)]])
    stored(tmp_path, 1, other)

    loader, loaders = DataLoader(range(9)), Made()
    evaluations = Evaluations(tmp_path, [0, 1], loaders, joins=True)
    assert [one.tolist() for one in evaluations.batches(0, 0)] == joined
    assert evaluations._length_on_ranks(loader) == 2
    (batch_path(tmp_path, (0, 0, 1), 0)).unlink()
    own = Evaluations(tmp_path, [0, 1], loaders, joins=False)
    assert own.batches(0, 0) is None
    again = Evaluations(tmp_path, [0, 1], loaders, joins=True)
    assert again.batches(0, 0) is None
    assert again._length_on_ranks(loader) is None


def test_evaluations_of_graphs_are_not_joined_by_their_nodes(tmp_path):
    """Graph 0 of one rank and graph 0 of another one would become one."""
    for rank in range(2):
        stored(tmp_path, rank, [[(rank, 1.0), (2 + rank, 2.0)]])
        path = batch_path(tmp_path, (0, 0, 0), rank)
        torch.save(((torch.arange(5.0), torch.tensor([0, 0, 0, 1, 1])), {}), path)
    assert Evaluations(tmp_path, [0, 1], Made(), joins=True).batches(0, 0) is None


def test_loaders_that_one_line_makes_have_their_own_lengths(tmp_path):
    """As after ``accelerator.prepare(model, optimizer, train_loader, val_loader)``."""
    facts = RankFacts(0, 2, "limit")
    for key, (samples, planned) in enumerate([(32, 4), (9, 2), (9, 2)]):
        loader = LoaderFacts(key, "train.py:9", "D", samples, 0, False, 4, "", False, False, 0)
        batches = [[0]] * planned
        loader.passes = [PassFacts(0, Phase.TRAINING, "", None, planned, batches, True, 0)]
        facts.loaders.append(loader)
    write_facts(tmp_path, facts)
    loaders = Made()
    evaluations = Evaluations(tmp_path, [0], loaders, joins=True)
    assert evaluations._length_on_ranks(DataLoader(range(32), 4)) == 4
    one = DataLoader(range(9), 4)
    assert evaluations._length_on_ranks(one) is None  # one of two
    loaders.keys[one] = facts.loaders[1]  # after its first pass
    assert evaluations._length_on_ranks(one) == 2


def test_results_of_joined_batches_are_all_kept():
    data_loader = pytest.importorskip("accelerate.data_loader")
    loader = data_loader.DataLoaderShard(range(9), batch_size=4)
    loader.begin()
    assert loader.gradient_state.remainder == 1
    keep_all_results(DataLoader(range(9), 4))  # another one
    assert loader.gradient_state.remainder == 1
    keep_all_results(loader.base_dataloader)
    assert loader.gradient_state.remainder == 0
    loader.end()
