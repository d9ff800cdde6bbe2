"""Rules on samples and validation: right orders of many kinds, and wrong ones."""

import random

import pytest
import torch

from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.events import CollectiveFacts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from paceline.observe.samples.contents import describe_dataset
from trainings import LOADER, LOOP, Training, find, shuffled, train, verified


def found_in(**changes):
    """Return what is found in a training with this order, without the replay."""
    epochs = changes.pop("epochs", 2)
    asked = Training(epochs=epochs, shorter=3, **changes)
    return find(verified(asked, with_replay=False))


def ids(found):
    return [one.mistake.id for one in found if not one.is_question]


@pytest.mark.parametrize(("size", "samples"), [(2, 32), (3, 32), (4, 50)])
def test_distributed_sampler_with_padding_is_right(size, samples):
    assert ids(found_in(size=size, samples=samples)) == []


def test_sampler_that_drops_the_remainder_is_right():
    order = lambda r, n, e: shuffled(0, 1, e, 50)[: 50 // n * n][r::n]  # noqa: E731
    assert ids(found_in(size=4, samples=50, order=order)) == []


def test_same_samples_are_named_with_ranks_and_line():
    (one,) = found_in(order=lambda r, n, e: shuffled(0, 1, e, 32))
    assert one.mistake.id == "same-samples"
    assert one.lines == [LOADER, LOOP]
    assert one.ranks == [0, 1]
    assert "Ranks 0 and 1 trained the same samples in the same order" in one.text


def test_two_of_four_ranks_with_the_same_samples_are_named():
    found = found_in(size=4, samples=48, order=lambda r, n, e: shuffled(r // 2, 2, e, 48))
    assert ids(found) == ["same-samples"]
    assert "0 and 1; 2 and 3" in found[0].text


def test_each_rank_with_the_whole_dataset_is_named():
    found = found_in(order=lambda r, n, e: shuffled(0, 1, e, 32, seed=100 * r))
    assert ids(found) == ["same-samples"]
    assert found[0].text.endswith(" 2 times.")


def test_different_shuffles_before_the_split_are_one_mistake():
    found = found_in(order=lambda r, n, e: shuffled(r, n, e, 64, seed=100 * r), samples=64)
    assert ids(found) == ["samples-repeated", "samples-never-trained"]


def test_sampling_with_replacement_is_right():
    def drawn(rank, size, epoch):
        generator = random.Random(rank + 10 * epoch)
        return [generator.randrange(32) for _ in range(16)]

    for sampler in ("RandomSampler", "WeightedRandomSampler"):
        found = found_in(order=drawn, sampler=sampler, has_epoch=False)
        assert ids(found) == []


def test_samples_of_virtual_epochs_are_right():
    """A sampler that draws a part of the dataset for each epoch, another part each time."""

    def part(rank, size, epoch):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(epoch)).tolist()
        return order[rank:40:size]

    found = found_in(order=part, samples=200, sampler="EpochSampler")
    assert ids(found) == []


def test_wrong_number_of_replicas_leaves_out_samples():
    found = found_in(order=lambda r, n, e: shuffled(r, 4, e, 64), samples=64)
    assert ids(found) == ["samples-never-trained"]
    assert "32 of 64 samples" in found[0].text


def test_overlapping_parts_repeat_samples():
    found = found_in(
        order=lambda r, n, e: [list(range(20)), list(range(12, 32))][r], sampler="RangeSampler"
    )
    assert ids(found) == ["samples-repeated"]


def test_missing_parts_are_named():
    found = found_in(
        order=lambda r, n, e: [list(range(12)), list(range(20, 32))][r],
        sampler="RangeSampler",
    )
    assert ids(found) == ["samples-never-trained"]
    assert "the first is sample 12" in found[0].text


def test_same_order_in_all_epochs_is_named_with_the_loop():
    (one,) = found_in(order=lambda r, n, e: shuffled(r, n, 0, 32), epochs=3)
    assert one.mistake.id == "epoch-not-set"
    assert one.lines == [LOOP, LOADER]
    assert "in the same random order in 3 epochs" in one.text
    assert "set_epoch" in one.text


def test_sequential_order_in_all_epochs_is_right():
    assert ids(found_in(order=lambda r, n, e: list(range(r, 32, n)), epochs=3)) == []


def test_new_loaders_of_each_epoch_are_one_stream():
    runs = verified(Training(order=lambda r, n, e: shuffled(r, n, 0, 32)), with_replay=False)
    for facts in runs.ranks:
        first = facts.loaders[0]
        passes = first.passes
        facts.loaders = [
            LoaderFacts(
                *(at, LOADER, first.dataset, 32, 77, False, 4, first.sampler, True, False, 0),
                passes=[PassFacts(0, *list(vars(one).values())[1:])],
            )
            for at, one in enumerate(passes)
        ]
        for batch in facts.batches:
            batch.loader, batch.pass_number = batch.pass_number, 0
    assert ids(find(runs)) == ["epoch-not-set"]


def test_parts_of_different_files_are_right():
    """Each rank has a dataset of its own, with the same positions."""
    runs = verified(
        Training(order=lambda r, n, e: shuffled(0, 1, e, 32), sampler="RandomSampler"),
        with_replay=False,
    )
    for facts in runs.ranks:
        facts.loaders[0].dataset_checksum = 100 + facts.rank
        for batch in facts.batches:
            batch.contents = [[one + 7000 * facts.rank for one in batch.contents[0]]]
    assert ids(find(runs)) == []
    for facts in runs.ranks:  # the same if the checksum is not known
        facts.loaders[0].dataset_checksum = 0
    assert ids(find(runs)) == []


def streamed(content, workers=0, epochs=1):
    """Return ranks that read a stream; content: checksum of (rank, batch, sample)."""
    ranks = train(Training(epochs=epochs, sampler="", has_epoch=False))
    for facts in ranks:
        loader = facts.loaders[0]
        loader.is_iterable, loader.dataset_length, loader.workers = True, None, workers
        loader.dataset_checksum = 0
        for one in loader.passes:
            one.planned = None
        for batch in facts.batches:
            batch.indices = None
            batch.contents = [[content(facts.rank, batch.number, at) for at in range(4)]]
    return VerifyRuns(ranks)


def test_streams():
    assert ids(find(streamed(lambda rank, number, at: 1000 * rank + 10 * number + at))) == []
    same = find(streamed(lambda rank, number, at: 10 * number + at))
    assert ids(same) == ["same-samples"]
    by_worker = find(streamed(lambda r, n, at: 1000 * r + 10 * (n // 2) + at, workers=2))
    assert ids(by_worker) == ["samples-repeated"]
    assert "Each of 2 workers reads the whole stream" in by_worker[0].text
    # samples that look alike prove nothing
    assert ids(find(streamed(lambda rank, number, at: 1))) == []


def test_points_of_a_boundary_without_a_loader_are_no_same_samples():
    """A model that is called with the same points on all ranks, and with others in between."""

    def content(rank, number, at):
        return at if number % 2 else 1000 * rank + 10 * number + at

    def without_loader(runs):
        for facts in runs.ranks:
            facts.loaders[0].dataset = ""
        return runs

    assert ids(find(without_loader(streamed(content)))) == []
    same = without_loader(streamed(lambda rank, number, at: 10 * number + at))
    assert ids(find(same)) == ["same-samples"]


def described(datasets, order, augmented=()):
    """Return runs of ranks that read these datasets; columns that are ``augmented`` differ."""
    runs = verified(Training(order=order, sampler="RandomSampler"), with_replay=False)
    for facts, dataset in zip(runs.ranks, datasets, strict=True):
        loader = facts.loaders[0]
        loader.dataset, loader.dataset_checksum = type(dataset).__name__, 0
        loader.root_checksum = describe_dataset(dataset)["root_checksum"]
        for batch in facts.batches:
            labels = [at % 3 for at in batch.indices]
            images = [9000 * facts.rank + at for at in batch.indices]
            columns = {"images": images, "labels": [one + 50 * facts.rank for one in labels]}
            batch.contents = [columns["images"] if "images" in augmented else batch.indices]
            batch.contents.append(columns["labels"] if "labels" in augmented else labels)
    return runs


class Images:
    """A dataset with an attribute that has a value for each sample."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)


def test_augmented_samples_are_known_by_the_attributes_of_the_dataset():
    def same(rank, size, epoch):
        return shuffled(0, 1, epoch, 32)

    files = [f"{n}.png" for n in range(32)]
    found = find(described([Images(files), Images(list(files))], same, ["images"]))
    assert ids(found) == ["same-samples"]
    assert ids(find(described([Images(files)] * 2, same))) == ["same-samples"]
    # each rank has its own files
    parts = [Images([f"{rank}/{one}" for one in files]) for rank in range(2)]
    assert ids(find(described(parts, same, ["images"]))) == []
    # the dataset reads other samples on each rank: labels differ as well
    assert ids(find(described([Images(files)] * 2, same, ["images", "labels"]))) == []


def test_single_samples_of_a_stream_on_several_ranks():
    orders = [shuffled(0, 1, 0, 24, seed=100 * rank) for rank in range(2)]
    (one,) = find(streamed(lambda rank, number, at: orders[rank][4 * number + at]))
    assert one.mistake.id == "samples-repeated"
    assert "equal samples among their first 16 and 16" in one.text
    (one,) = find(streamed(lambda rank, number, at: 10 * rank + 4 * number + at))
    assert one.mistake.id == "samples-repeated"
    assert "their parts overlap" in one.text
    # samples of few kinds
    assert ids(find(streamed(lambda rank, number, at: (16 * rank + 4 * number + at) % 7))) == []


def test_stream_with_set_epoch_and_one_order_is_a_question():
    runs = streamed(lambda rank, number, at: 1000 * rank + 10 * number + at, epochs=2)
    assert ids(find(runs)) == []  # may be a file that is read in order
    for facts in runs.ranks:
        facts.loaders[0].sampler_has_epoch = True
    (one,) = find(runs)
    assert (one.mistake.id, one.is_question) == ("epoch-not-set", True)
    assert "set_epoch of the TensorDataset" in one.text


def validated(plans, samples=20, sampler="SequentialSampler", drops_last=False, kind=""):
    """Return runs whose ranks validate these samples; None: the rank does not validate."""
    ranks = train(Training(epochs=1))
    for facts in ranks:
        plan = plans[facts.rank]
        if kind:
            facts.collectives.append(CollectiveFacts(kind, 8, Phase.EVALUATION, 4, False, ""))
        if plan is None:
            continue
        batches = [plan[at : at + 4] for at in range(0, len(plan), 4)]
        facts.loaders.append(
            LoaderFacts(
                *(1, "train.py:30", "TensorDataset", samples, 88, False, 4, sampler, False),
                *(drops_last, 0),
                passes=[PassFacts(0, Phase.EVALUATION, "train.py:33", None, 0, batches, True, 4)],
            )
        )
        for number, one in enumerate(batches):
            facts.batches.append(
                BatchFacts(1, 0, number, len(one), one, [[500 + at for at in one]], 4)
            )
    return VerifyRuns(ranks)


def test_validation_of_all_samples_is_right():
    whole = list(range(20))
    assert ids(find(validated([whole, None]))) == []
    assert ids(find(validated([whole, whole]))) == []
    assert ids(find(validated([whole[::2], whole[1::2]], kind="allreduce"))) == []
    chosen = validated([whole[:8], whole[:8]], sampler="SubsetRandomSampler")
    assert ids(find(chosen)) == []


def test_validation_with_padding_is_named():
    plans = [[*range(0, 21, 2)], [*range(1, 21, 2), 0]]
    found = find(validated(plans, 21, "DistributedSampler", kind="allreduce"))
    assert ids(found) == ["validation-repeats-samples"]
    assert found[0].lines[0] == "train.py:30"
    gathered = find(validated(plans, 21, "DistributedSampler", kind="allgather"))
    assert [one.mistake.id for one in gathered if one.is_question] == ["validation-repeats-samples"]


def test_validation_without_the_last_batch_is_named():
    plans = [list(range(16)), None]
    found = find(validated(plans, 19, drops_last=True))
    assert ids(found) == ["validation-misses-samples"]
    assert "leaves out 3 of 19 samples in a validation pass: drop_last is set" in found[0].text


def test_ranks_that_train_parts_of_one_batch_do_not_train_the_same_samples():
    """Each reads the global batch. Without the parts that the models got, the samples are equal."""
    for has_parts in (True, False):
        runs = verified(
            Training(order=lambda r, n, e: shuffled(0, 1, e, 32), sampler="RandomSampler"),
            with_replay=False,
        )
        for facts in runs.ranks:
            for batch in facts.batches:
                batch.rows = [*range(batch.samples)][facts.rank :: 2] if has_parts else []
        wrong = [one for one in find(runs) if not one.is_question]
        assert [one.mistake.id for one in wrong] == ["same-samples"] * (not has_parts)
