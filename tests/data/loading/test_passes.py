"""Passes over a Loader: the epoch of each, abandoned and resumed passes, and foreign samplers."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data import Loader
from paceline.data.sampling.samplers import BlockShuffled, Shuffled, Weighted
from paceline.data.sampling.shard_loader import shard

SAMPLES = np.arange(100, dtype=np.float32)


def numbers(batches):
    return [int(v) for x in batches for v in x.flatten()]


def order(epoch, seed=0):
    return Shuffled(100, seed).order(seed, epoch).tolist()


def noisy(x, rng):
    return np.float32(rng.random()) + 0 * x


def break_off(loader):
    found = []
    for x in loader:
        found.append(x)
        if len(found) == 5:
            break
    return numbers(found)


def cut(loader):
    return numbers(islice(loader, 5))


kept_iterators = []


def keep_iterator(loader):
    """Read 5 batches, and keep the iterator, so that it is never freed."""
    kept_iterators.append(iter(loader))
    return numbers(next(kept_iterators[-1]) for _ in range(5))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("abandon", [break_off, cut, keep_iterator])
def test_each_pass_has_the_next_epoch_also_after_an_abandoned_one(abandon, workers):
    loader = Loader(SAMPLES, 10, shuffle=True, num_workers=workers)
    passes = [abandon(loader) for _ in range(12)]
    assert passes == [order(epoch)[:50] for epoch in range(12)]
    assert {sample for one in passes for sample in one} == set(range(100))
    assert numbers(loader) == order(12)


def test_augmentation_differs_after_an_abandoned_pass():
    loader = Loader(SAMPLES, 10, transform=noisy)
    first, second = (torch.cat(list(islice(loader, 5))) for _ in range(2))
    assert not torch.equal(first, second)


def test_nested_passes_are_independent():
    loader = Loader(SAMPLES, 10, shuffle=True)
    pairs = list(zip(loader, loader, strict=True))
    assert numbers(x for x, _ in pairs) == order(0)
    assert numbers(y for _, y in pairs) == order(1)
    assert loader.state_dict() == {"epoch": 2, "sample": 0}


def test_persistent_workers_set_by_a_framework_do_not_join_passes():
    loader = Loader(SAMPLES, 10, shuffle=True)
    loader.__dict__["persistent_workers"] = True  # as knobs.loader does
    first, second = iter(loader), iter(loader)
    assert numbers([next(first), next(second), next(first)]) == [
        *order(0)[:10],
        *order(1)[:10],
        *order(0)[10:20],
    ]


@pytest.mark.parametrize("call", ["loader", "sampler"])
def test_epoch_set_by_a_framework_is_used(call):
    loader = Loader(SAMPLES, 10, shuffle=True)
    target = loader if call == "loader" else loader.sampler
    for epoch in (4, 4, 0, 2):
        target.set_epoch(epoch)
        assert cut(loader) == order(epoch)[:50]
    assert numbers(loader) == order(3)


def test_epoch_of_a_distributed_sampler_is_also_that_of_the_augmentation():
    def made():
        sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=1)
        return Loader(SAMPLES, 10, sampler=sampler, transform=lambda x, rng: x + rng.random())

    whole, resumed = made(), made()
    for epoch in range(4):
        whole.sampler.set_epoch(epoch)
        last = torch.cat(list(whole))
    resumed.sampler.set_epoch(3)
    assert torch.equal(torch.cat(list(resumed)), last)
    other = made()
    other.set_epoch(3)
    assert torch.equal(torch.cat(list(other)), last)


@pytest.mark.parametrize("kind", [Shuffled, Weighted, BlockShuffled])
def test_own_samplers_advance_in_torch_dataloader(kind):
    made = {"Shuffled": (100,), "Weighted": ([1.0] * 100,), "BlockShuffled": (100, 5)}
    sampler = kind(*made[kind.__name__])
    loader = DataLoader(TensorDataset(torch.arange(100)), 10, sampler=sampler)
    found = [numbers(x for (x,) in islice(loader, 5)) for _ in range(3)]
    assert found == [sampler.order(0, epoch)[:50].tolist() for epoch in range(3)]
    sampler.set_epoch(1)
    assert numbers(x for (x,) in loader) == sampler.order(0, 1).tolist()


# Resume


def test_state_after_a_break_continues_that_pass():
    loader = Loader(SAMPLES, 10, shuffle=True)
    list(loader)
    seen = break_off(loader)
    state = loader.state_dict()
    assert state == {"epoch": 1, "sample": 50}
    fresh = Loader(SAMPLES, 4, shuffle=True)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert seen + numbers(fresh) == order(1)
    assert numbers(fresh) == order(2)


@pytest.mark.parametrize("call", ["loader", "sampler"])
def test_set_epoch_after_loading_a_state(call):
    """Frameworks load the state, then set the epoch, then iterate."""
    loader = Loader(SAMPLES, 10, shuffle=True)
    target = loader if call == "loader" else loader.sampler
    loader.load_state_dict({"epoch": 3, "sample": 70})
    target.set_epoch(3)
    assert loader.state_dict() == {"epoch": 3, "sample": 70}
    assert numbers(loader) == order(3)[70:]
    loader.load_state_dict({"epoch": 3, "sample": 70})
    target.set_epoch(4)  # the checkpoint was taken at the end of an epoch of fewer batches
    assert loader.state_dict() == {"epoch": 4, "sample": 0}
    assert numbers(loader) == order(4)


def random_samplers(generator=None):
    weights = [1.0] * 100
    return {
        "RandomSampler": RandomSampler(SAMPLES, generator=generator),
        "replacement": RandomSampler(SAMPLES, True, 80, generator=generator),
        "SubsetRandomSampler": SubsetRandomSampler(range(100), generator=generator),
        "WeightedRandomSampler": WeightedRandomSampler(weights, 90, generator=generator),
    }


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("name", list(random_samplers()))
def test_resume_with_samplers_of_torch(name, own_generator):
    def made():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return Loader(SAMPLES, 10, sampler=random_samplers(generator)[name])

    torch.manual_seed(1)
    whole = [numbers(made_of) for loader in [made()] for made_of in (loader, loader)]
    assert whole[0] != whole[1]
    torch.manual_seed(1)
    loader = made()
    assert numbers(loader) == whole[0]
    assert cut(loader) == whole[1][:50]
    state = loader.state_dict()
    torch.manual_seed(99)
    fresh = made()
    fresh.load_state_dict(state)
    assert numbers(fresh) == whole[1][50:]
    if name == "RandomSampler":
        assert sorted(whole[1]) == list(range(100))


class Hidden(Sampler):
    """A sampler with a random generator of its own that cannot be seeded again."""

    def __init__(self):
        self.random = random.Random(0)

    def __len__(self):
        return 100

    def __iter__(self):
        return iter(self.random.sample(range(100), 100))


class Endless(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        while True:
            yield 7


def test_resume_is_refused_where_the_order_cannot_be_repeated():
    for sampler in (Hidden(), RandomSampler(SAMPLES), Endless()):
        loader = Loader(SAMPLES, 10, sampler=sampler)
        assert len(cut(loader)) == 50
        state = loader.state_dict()
        if isinstance(sampler, RandomSampler):
            del state["order_seed"]  # as in states of older versions
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=f"{type(sampler).__name__}.*HINT: shuffle=True"):
            next(iter(loader))
    loader = Loader(SAMPLES, 10, sampler=range(99, -1, -1))
    loader.load_state_dict({"epoch": 0, "sample": 90})
    assert numbers(loader) == list(range(9, -1, -1))


def test_sharded_resume_is_refused_where_the_order_cannot_be_repeated():
    loader = DataLoader(TensorDataset(torch.arange(100)), 10, sampler=Hidden())
    part = sharded(loader)
    assert len(list(part.iterate(0))) == 10
    with pytest.raises(ValueError, match=r"DataLoader\(TensorDataset\): the sampler Hidden.*HINT"):
        next(part.iterate(1, start=3))
    repeats = sharded(DataLoader(TensorDataset(torch.arange(100)), 10, sampler=range(100)))
    assert len(list(repeats.iterate(1, start=3))) == 7


# world.shard


def sharded(loader, rank=0, ranks=1, **options):
    options = {"seed": 7, "agree": lambda *_: None, "count_all": lambda n: n} | options
    return shard(loader, rank=rank, ranks=ranks, **options)


def test_loaded_state_is_refused_by_world_shard():
    for state in ({"epoch": 0, "sample": 50}, {"epoch": 2, "sample": 0}):
        loader = Loader(SAMPLES, 10, shuffle=True)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match=f"epoch {state['epoch']}, sample {state['sample']}"):
            sharded(loader, 0, 2)
    loader.load_state_dict({"epoch": 0, "sample": 0})
    assert len(list(sharded(loader, 0, 2))) == 5


def test_sharded_transform_depends_on_the_seed_of_the_world():
    found = [
        torch.cat(list(sharded(Loader(SAMPLES, 10, transform=noisy, seed=own), seed=seed)))
        for seed, own in ((1, 0), (1, 0), (2, 0), (1, 3))
    ]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


@pytest.mark.parametrize("kind", ["Loader", "DataLoader"])
def test_sharded_passes_are_independent(kind):
    made = {
        "Loader": lambda: Loader(SAMPLES, 10, shuffle=True),
        "DataLoader": lambda: DataLoader(SAMPLES, 10, shuffle=True),
    }[kind]
    expected = [numbers(x for x, _ in sharded(made()).iterate(epoch)) for epoch in range(3)]
    part = sharded(made())
    passes = [iter(part) for _ in range(2)]
    mixed = [next(passes[k % 2]) for k in range(6)]
    assert numbers(mixed[::2]) == expected[0][:30]
    assert numbers(mixed[1::2]) == expected[1][:30]
    assert numbers(part) == expected[2]
    part.set_epoch(1)
    assert numbers(part) == expected[1]


def test_lightning_with_limited_batches_and_resume_in_an_epoch(tmp_path):
    lightning = pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), {}

        def training_step(self, batch, _):
            self.seen.setdefault(self.current_epoch, []).extend(numbers([batch]))
            return self.layer(batch[:, None]).sum() * 1e-9

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    def fit(resume=None, **options):
        quiet = ("logger", "enable_progress_bar", "enable_model_summary")
        model, loader = Model(), Loader(SAMPLES, 10, shuffle=True)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, **dict.fromkeys(quiet, False), **options
        )
        trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
        return model.seen

    seen = fit(max_epochs=4, limit_train_batches=5, enable_checkpointing=False)
    assert seen == {epoch: order(epoch)[:50] for epoch in range(4)}
    saving = callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=13, save_top_k=-1)
    fit(max_steps=14, max_epochs=-1, callbacks=[saving])
    resumed = fit(next(tmp_path.glob("*step=13.ckpt")), max_epochs=3, enable_checkpointing=False)
    assert resumed == {1: order(1)[30:], 2: order(2)}
