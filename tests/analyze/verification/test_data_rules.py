"""Rules on what datasets contain, on remainders and on the order of streams."""

import torch
from test_sample_rules import found_in, ids, streamed

from paceline.observe.facts.events import SeedFacts
from trainings import LOADER, LOOP, Training, find, shuffled, train, verified


def with_contents(content, seeds=lambda rank: [], **changes):
    """Return what is found in 4 epochs, with columns of (rank, epoch, position)."""
    runs = verified(Training(epochs=4, **changes), with_replay=False)
    for facts in runs.ranks:
        for batch in facts.batches:
            rows = [content(facts.rank, batch.pass_number, at) for at in batch.indices]
            batch.contents = [list(column) for column in zip(*rows, strict=True)]
        facts.loaders[0].dataset_checksum = 0
        facts.seeds = seeds(facts.rank)
    return find(runs)


def test_features_that_each_rank_draws_for_itself_are_named():
    (one,) = with_contents(lambda rank, epoch, at: (1000 * rank + at, at % 3))
    assert one.mistake.id == "different-random-numbers"
    assert "differ between the ranks in number 1 of 2 tensors: in" in one.text
    assert one.lines == [LOADER, LOOP]
    (one,) = with_contents(lambda rank, epoch, at: (1000 * rank + at, 500 * rank + at % 3))
    assert "differ between the ranks: in" in one.text
    assert not one.is_question


def test_labels_that_each_rank_numbers_in_another_order_are_named():
    (one,) = with_contents(lambda rank, epoch, at: (at, (at + rank * (at % 2)) % 3))
    assert one.mistake.id == "different-random-numbers"
    assert "in number 2 of 2 tensors" in one.text
    assert not one.is_question


def test_data_that_a_seed_of_each_rank_makes_are_asked_about():
    """Nothing in them is common: they may be meant. Common targets show one dataset."""
    for target, is_question in ((500, True), (0, False)):
        found = with_contents(
            lambda rank, epoch, at, target=target: (1000 * rank + at, target * rank + at % 3),
            seeds=lambda rank: [SeedFacts("torch", rank, "train.py:3", 0)],
        )
        assert [one.is_question for one in found] == [is_question]
        assert found[0].lines[0] == "train.py:3"


def test_augmentation_is_no_other_data():
    assert ids(with_contents(lambda rank, epoch, at: (100 * epoch + at, at % 3))) == []
    by_rank = with_contents(lambda rank, epoch, at: (7000 * rank + 100 * epoch + at, at % 3))
    assert ids(by_rank) == []


def test_data_that_each_rank_reads_alone_may_differ():
    found = with_contents(
        lambda rank, epoch, at: (1000 * rank + at, at % 3),
        order=lambda r, n, e: shuffled(0, 1, e + 10 * r, 32),
        sampler="RandomSampler",
    )
    assert ids(found) == []


def remainder(samples, size, epochs=2):
    """Return what is found if each rank has an equal part of its own, and shuffles it."""
    length = samples // size

    def order(rank, ranks, epoch):
        generator = torch.Generator().manual_seed(10 * epoch + rank)
        return torch.randperm(length, generator=generator).tolist()

    asked = Training(
        size, length, epochs=epochs, order=order, sampler="RandomSampler", has_epoch=False
    )
    runs = verified(asked, with_replay=False)
    for facts in runs.ranks:
        loader = facts.loaders[0]
        start = facts.rank * length
        loader.subset, loader.dataset = list(range(start, start + length)), "Subset"
        loader.root_length, loader.root_checksum = samples, 5
        loader.split_line = "train.py:8"
    return find(runs)


def test_remainder_that_is_never_trained_is_a_question():
    (one,) = remainder(43, 4)
    assert (one.mistake.id, one.is_question) == ("samples-never-trained", True)
    assert "3 of 43 samples" in one.text
    assert one.lines[0] == "train.py:8"
    assert remainder(44, 4) == []


def test_dropped_batch_of_another_order_in_each_epoch_is_right():
    found = found_in(order=lambda r, n, e: shuffled(r, n, e, 46)[:20], samples=46)
    assert found == []


def test_stream_that_shuffles_in_the_same_order_is_named():
    runs = streamed(lambda rank, number, at: 1000 * rank + 10 * number + at, epochs=2)
    for facts in runs.ranks:
        facts.loaders[0].sampler_seed_line = "train.py:5"
    (one,) = find(runs)
    assert (one.mistake.id, one.is_question) == ("epoch-not-set", False)
    assert one.lines == ["train.py:5", LOOP, LOADER]
    assert "the order of TensorDataset does not depend on the epoch" in one.text


def test_ends_of_streams_at_other_places_are_not_compared():
    """The last batches that ranks trained are of different sizes; both were read to the end."""
    runs = verified(Training(epochs=1, batch=8, order=lambda r, n, e: list(range(16 - 4 * r))))
    for facts in runs.ranks:
        facts.loaders[0].is_iterable = True
        facts.loaders[0].passes[0].is_read = True
    assert "uneven-batches-averaged" in ids(find(runs))
    runs.ranks[0].loaders[0].passes[0].skipped = 1  # it has one batch more
    assert "uneven-batches-averaged" not in ids(find(runs))


def read_whole(ranks_samples, alone_samples):
    """Return what is found if ranks and one process read so many samples of a stream."""
    content = lambda rank, number, at: 1000 * rank + 10 * number + at  # noqa: E731
    runs = streamed(content)
    runs.alone = train(Training(size=1, epochs=1, sampler="", has_epoch=False))[0]
    totals = zip((*runs.ranks, runs.alone), (*ranks_samples, alone_samples), strict=True)
    for facts, total in totals:
        loader = facts.loaders[0]
        loader.is_iterable = True
        (one,) = loader.passes
        one.planned, one.is_read = None, True
        one.skipped_samples = total - sum(batch.samples for batch in facts.batches)
    return find(runs)


def test_stream_that_is_divided_twice_is_named():
    found = read_whole((50, 50), 200)
    assert ids(found) == ["samples-never-trained"]
    assert "2 ranks read 100 samples of the stream (50, 50), and one process reads 200" in (
        found[0].text
    )
    assert ids(read_whole((100, 98), 200)) == []
    assert ids(read_whole((200, 200), 200)) == []  # each rank has as many steps as one process


def test_few_samples_that_are_never_trained_are_asked_if_they_are_always_the_same():
    always = found_in(
        samples=32, sampler="BucketSampler", order=lambda r, n, e: shuffled(r, n, e, 28)
    )
    assert [(one.mistake.id, one.is_question) for one in always] == [
        ("samples-never-trained", True)
    ]
    others = found_in(
        samples=32, sampler="BucketSampler", order=lambda r, n, e: shuffled(0, 1, e, 32)[r:28:n]
    )
    assert others == []


def test_same_order_again_without_a_loader_is_named():
    def found(content, line="train.py:7"):
        runs = streamed(content, epochs=3)
        for facts in runs.ranks:
            loader = facts.loaders[0]
            loader.dataset, loader.sampler_seed_line = "", line
            loader.passes = loader.passes[:1]
            for number, batch in enumerate(facts.batches):
                batch.pass_number, batch.number = 0, number
        return find(runs)

    again = lambda rank, number, at: 1000 * rank + 10 * number + at  # noqa: E731
    (one,) = found(again)
    assert (one.mistake.id, one.lines[0]) == ("epoch-not-set", "train.py:7")
    assert "the same 4 batches in the same order again, 3 times" in one.text
    assert found(again, line="") == []  # it does not shuffle


def test_same_samples_in_other_orders_without_a_loader_are_named():
    def found(order):
        runs = streamed(lambda rank, number, at: 0, epochs=3)
        for facts in runs.ranks:
            facts.loaders[0].dataset = ""
            facts.loaders[0].passes = facts.loaders[0].passes[:1]
            for number, batch in enumerate(facts.batches):
                epoch, at = divmod(number, 4)
                batch.pass_number, batch.number = 0, number
                batch.contents = [order(facts.rank, epoch)[4 * at : 4 * at + 4]]
        return ids(find(runs))

    same = lambda rank, epoch: shuffled(0, 1, epoch, 16, seed=50 * rank)  # noqa: E731
    assert found(same) == ["same-samples"]
    own = lambda rank, epoch: [100 * rank + one for one in same(rank, epoch)]  # noqa: E731
    assert found(own) == []
