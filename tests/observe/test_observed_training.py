"""Facts of real ranks."""

import json
import textwrap

import numpy as np
import pytest
import ranks
from torch.utils.data import DistributedSampler

from paceline import data
from paceline.analyze.verification.replayed_steps import ReplayedSteps
from paceline.analyze.verification.steps import joint_steps
from paceline.observe.facts.ranks import SKETCH_SIZE, RankFacts, read_facts
from paceline.observe.facts.samples import Phase
from paceline.observe.samples.loaders import dataset_of
from paceline.observe.settings import VARIABLE, VerifySettings

DDP = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    class Noisy(Dataset):
        def __len__(self):
            return 75

        def __getitem__(self, index):
            x = torch.full((4,), float(index)) / 75 - 0.5
            return x + 0.1 * torch.randn(4), index % 3

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(9):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item()!r}", flush=True)
"""
RANKS = 2


def observe(tmp_path, script, size=RANKS, **more):
    """Run a script on observed ranks; return their facts, and what they printed."""
    path = ranks.write(tmp_path, script)
    settings = VerifySettings(str(tmp_path / "facts"), **more)
    launcher = f"paceline --record {tmp_path / 'record'}"
    done = ranks.run(path, ranks=size, launcher=launcher, **{VARIABLE: settings.to_json()})
    return [read_facts(tmp_path / "facts", rank) for rank in range(size)], done.stdout


def row(facts: RankFacts, number: int) -> np.ndarray:
    return facts.sketches[number][:SKETCH_SIZE]


def test_ddp_script(tmp_path):
    every, _ = observe(tmp_path, DDP)
    assert [one.rank for one in every] == [0, 1]
    assert all(one.ended == "limit" and not one.unseen for one in every)
    for steps in zip(*(one.steps for one in every), strict=True):
        for name in ("0/0.weight", "0/1.bias"):
            local = [
                row(facts, step.backwards[0].gradients[name])
                for facts, step in zip(every, steps, strict=True)
            ]
            used = row(every[0], steps[0].gradients[name])
            assert np.allclose(np.mean(local, axis=0), used, rtol=1e-5, atol=1e-7)
            assert not np.allclose(local[0], used, rtol=1e-3)
    for facts in every:
        (loader,) = facts.loaders
        assert loader.line == "script.py:19"
        assert [one.phase for one in loader.passes] == [Phase.TRAINING] * 3
        assert not any(one.is_complete for one in loader.passes)  # shortened
        sampler = DistributedSampler(range(75), num_replicas=RANKS, rank=facts.rank)
        for one in loader.passes:
            sampler.set_epoch(one.number)
            planned = [index for batch in one.planned or () for index in batch]
            assert planned == list(sampler)
            read = [batch for batch in facts.batches if batch.pass_number == one.number]
            assert read[0].indices == planned[:4]
            assert read[-1].samples == 2  # the last batch of the pass, which is smaller
        draws = [one for one in facts.draws if one.place == "fetch" and one.has_drawn]
        assert {one.generator for one in draws} == {"torch"}
        assert {one.worker for one in draws} == {0}
        assert "script.py:13" in {one.line for one in draws}
        assert facts.outputs[0].line == "script.py:29"
        assert facts.steps[0].backwards[0].reduction == "mean"
    seeds = [(one.generator, one.value, one.line) for one in every[0].seeds]
    assert seeds == [("torch", 0, "script.py:16")]


SHARDED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            (model(torch.randn(5, 4)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_sharded_model_accumulates_gradients_of_all_backwards(tmp_path):
    every, _ = observe(tmp_path, SHARDED)
    for steps in zip(*(one.steps for one in every), strict=True):
        assert [len(one.backwards) for one in steps] == [2, 2]
        for name in ("0/0.weight", "0/1.bias"):
            local = [
                sum(row(facts, one.gradients[name]) for one in step.backwards)
                for facts, step in zip(every, steps, strict=True)
            ]
            parts = [
                row(facts, step.gradients[name])
                for facts, step in zip(every, steps, strict=True)
                if name in step.gradients
            ]
            assert np.allclose(np.mean(local, axis=0), sum(parts), rtol=1e-4, atol=1e-7)


NESTED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, batches):
            for (x,) in batches:
                y = nn.functional.linear(x, self.net.weight, self.net.bias)
                (y.square().mean() / len(batches)).backward()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), 4, shuffle=True)
    held_out = DataLoader(TensorDataset(torch.randn(8, 4)), 4)
    for epoch in range(3):
        with torch.no_grad():
            for (x,) in held_out:
                model.net(x)
        batches = iter(loader)
        for step in range(2):
            model([next(batches), next(batches)])
            optimizer.step()
            optimizer.zero_grad()
"""


def test_forward_that_contains_its_backwards(tmp_path):
    """The loaders draw random numbers, and the forward does not; each backward has one batch."""
    every, _ = observe(tmp_path, NESTED)
    for facts in every:
        assert not [one for one in facts.draws if one.place == "forward" and one.has_drawn]
        trained = [[one.batches for one in step.backwards] for step in facts.steps]
        assert trained
        assert all(len(batches) == 1 for step in trained for batches in step)
        read = [at for step in trained for (at,) in step]
        assert len(set(read)) == len(read)
        assert {facts.batches[at].loader for at in read} == {facts.batches[read[0]].loader}


@pytest.mark.long
def test_printed_numbers_do_not_change(tmp_path):
    """Passes of four batches are not shortened: the observed run prints the same losses."""
    script = DDP.replace("return 75", "return 32").replace("range(9)", "range(2)")
    (tmp_path / "plain").mkdir()
    plain = ranks.run(ranks.write(tmp_path / "plain", script), ranks=RANKS).stdout
    every, observed = observe(tmp_path, script)
    assert sorted(ranks.untagged(plain)) == sorted(ranks.untagged(observed))
    assert len(ranks.untagged(plain)) == 2 * 4 * RANKS
    assert all(one.ended == "script" for one in every)


@pytest.mark.long
def test_replay_on_one_rank_has_the_same_gradients(tmp_path):
    every, _ = observe(tmp_path, DDP, keeps_mib=16)
    stored = str(tmp_path / "facts")
    for permutes in (False, True):
        folder = tmp_path / f"replay-{permutes}"
        settings = VerifySettings(str(folder), replays=stored, permutes=permutes)
        script = tmp_path / "script.py"
        ranks.run(
            script,
            ranks=1,
            launcher=f"paceline --record {tmp_path / f'record-{permutes}'}",
            **{VARIABLE: settings.to_json()},
        )
        alone = read_facts(folder, 0)
        assert not alone.unseen
        assert len(alone.steps) == len(every[0].steps)
        even = [number for number in range(len(alone.steps)) if number % 6 != 5]
        for number in even[:5]:  # up to the last, smaller batches, which DDP weights as the others
            ours, theirs = alone.steps[number], every[0].steps[number]
            assert ours.gradients.keys() == theirs.gradients.keys()
            for name in ours.gradients:
                one, other = row(alone, ours.gradients[name]), row(every[0], theirs.gradients[name])
                assert np.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_settings_survive_the_environment(monkeypatch):
    from paceline.observe.settings import settings_of_process

    settings = VerifySettings("/a", ("/c",), replays="/d", permutes=True)
    assert settings_of_process({VARIABLE: settings.to_json()}) == settings
    assert settings_of_process({}) is None
    assert json.loads(settings.to_json())["folder"] == "/a"


CHANGES = """
    import copy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from tensorboardX import SummaryWriter

    dist.init_process_group("gloo")
    rank, writer = dist.get_rank(), SummaryWriter()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    net[1].bias.register_hook(lambda gradient: gradient / 4)
    ema = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(32, 4) + rank
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    noise = torch.Generator().manual_seed(3)
    for epoch in range(9):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] *= 0.9
            x = x + torch.randn(x.shape, generator=noise)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            for p in net.parameters():
                p.grad.clamp_(-0.01, 0.01)
                dist.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    for slow, fast in zip(ema.parameters(), net.parameters()):
                        slow.lerp_(fast, 0.5)
        writer.add_scalar("fit", loss.item(), epoch)
"""
WRITER = """
class SummaryWriter:
    def add_scalar(self, tag, value, step):
        pass
"""


def test_lines_that_change_gradients_and_states(tmp_path):
    (tmp_path / "tensorboardX").mkdir()
    (tmp_path / "tensorboardX" / "writer.py").write_text(WRITER)
    (tmp_path / "tensorboardX" / "__init__.py").write_text("from .writer import SummaryWriter")
    every, _ = observe(tmp_path, CHANGES)

    def line(words):
        rows = textwrap.dedent(CHANGES).splitlines()
        return f"script.py:{next(at for at, row in enumerate(rows, 1) if words in row)}"

    for facts in every:
        step, model = facts.steps[1], facts.models[0]
        assert step.gradient_lines == [line("clamp_"), line("all_reduce"), line("/= 2")]
        assert not step.value_lines
        assert facts.optimizers[0].rate_lines == [line("*= 0.9")]
        assert model.hook_lines == [line("register_hook")]
        (backward,) = step.backwards
        raw, local = backward.raw["0/1.bias"], backward.gradients["0/1.bias"]
        assert row(facts, raw) == pytest.approx(4 * row(facts, local))
        assert set(backward.raw) == {"0/1.bias"}
        draws = [x for x in facts.draws if x.place == "loop" and x.has_drawn]
        assert {(x.generator, x.line) for x in draws} == {("torch:noise", line("torch.randn(x"))}
        assert [x.line for x in facts.outputs] == [line("add_scalar")] * 3
        assert facts.outputs[0].text.startswith("fit: ")
    changed = [facts.states[-1].changed_by for facts in every]
    assert changed == [[line("slow.lerp_")], []]


STREAM = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            for at in range(dist.get_rank(), 151, 2):
                yield torch.full((4,), float(at)) / 75 - 0.5, at % 3

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Stream(), batch_size=4)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2 + 5):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""


def test_last_batch_of_a_stream_is_trained(tmp_path):
    every, _ = observe(tmp_path, STREAM)
    for facts, last in zip(every, (4, 3), strict=True):
        (loader,) = facts.loaders
        assert not facts.unseen
        assert [one.batches for one in loader.passes] == [6] * 3
        for one in loader.passes:
            assert (one.skipped, one.skipped_samples, one.is_read) == (13, 52, True)
            read = [batch for batch in facts.batches if batch.pass_number == one.number]
            assert [batch.samples for batch in read] == [4] * 5 + [last]


GROUPS = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(44, 4), torch.arange(44) % 3)
    loader, held = DataLoader(data, batch_size=4), DataLoader(data, batch_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(9):
        for at, (x, y) in enumerate(loader, 1):
            nn.functional.cross_entropy(model(x), y).backward()
            if at % 3 == 0 or at == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for x, y in held:
                model(x)
"""


def test_smaller_group_of_batches_at_the_end_of_an_epoch_is_trained_once(tmp_path):
    for facts in observe(tmp_path, GROUPS)[0]:
        train, held = facts.loaders
        assert [one.batches for one in train.passes] == [11, 6, 6]
        assert [len(one.planned) for one in train.passes] == [11] * 3
        assert [one.is_complete for one in train.passes] == [True, False, False]
        assert {one.batches for one in held.passes} == {24}
        assert [len(step.backwards) for step in facts.steps] == [3, 3, 3, 2, 3, 3, 3, 3]


LOOPS = """
    import itertools
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    held, labels = torch.randn(10, 4), torch.arange(10) % 3
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = itertools.cycle(loader)
    for step in range(12):
        x, y = next(batches)
        with torch.no_grad():
            wanted = teacher(x)
        loss = nn.functional.cross_entropy(model(x) + wanted, y, torch.tensor([1.0, 2.0, 4.0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 5:
            model.eval()
            with torch.no_grad():
                for part in held[dist.get_rank()::2].split(3):
                    model.module(part)
            model.train()
"""


def test_batches_that_no_loader_returns(tmp_path):
    every, _ = observe(tmp_path, LOOPS)
    for facts in every:
        loader, teacher, kept, evaluation = facts.loaders
        assert teacher.line == "script.py:17"  # of the steps whose batches no loader returned
        assert (evaluation.dataset, evaluation.line) == ("", "script.py:28")
        assert [one.phase for one in evaluation.passes] == [Phase.EVALUATION] * 2
        assert [(one.batches, one.is_complete) for one in evaluation.passes] == [(2, True)] * 2
        sizes = [b.samples for b in facts.batches if b.loader == evaluation.key]
        assert sizes == [3, 2, 3, 2]
        read = [b.contents[0] for b in facts.batches if b.loader == loader.key]
        again = [b.contents[0] for b in facts.batches if b.loader == kept.key]
        assert (len(read), len(again)) == (3, 7)  # those of two steps after the end are not known
        assert again == [read[at % 3] for at in range(5, 12)]
        of_classes = {0: 1.0, 1: 2.0, 2: 4.0}
        weights = [step.backwards[0].class_weight for step in facts.steps[:3]]
        first = [at for one in loader.passes[0].planned for at in one]
        assert weights == [
            sum(of_classes[at % 3] for at in first[4 * n : 4 * n + 4]) for n in range(3)
        ]
        statistics = [one for one in facts.states if one.kind == "statistics"]
        assert statistics[0].rows.keys() == {"0/1.running_mean", "0/1.running_var"}


RETURNED = """
    import torch
    import torch.distributed as dist
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, nodes, pairs):
            h = self.first(nodes).tanh()
            return self.last(h[pairs[:, 0]] * h[pairs[:, 1]]).squeeze(1)

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(4))

        def forward(self, scores):
            self.center.mul_(0.9).add_(0.1 * scores.detach().mean())
            return (scores - self.center.mean()).square().mean()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes, pairs = torch.randn(30, 4), torch.randint(30, (48, 2))
    model, loss_of = Net(), Centered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for start in range(0, 48, 8):
            mine = pairs[start : start + 8][rank::world]
            loss = loss_of(model(nodes, mine))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients):
                dist.all_reduce(gradient)
                parameter.grad = gradient / world
            nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=0.01)
            optimizer.step()
"""


def test_gradients_that_autograd_returns(tmp_path):
    every, _ = observe(tmp_path, RETURNED)
    for facts in every:
        assert not facts.unseen
        assert [one.samples for one in facts.batches] == [4] * 12  # pairs, and not nodes
        assert len({tuple(one.contents[0]) for one in facts.batches}) == 6
        for step in facts.steps:
            (backward,) = step.backwards
            assert backward.is_returned
            assert backward.gradients.keys() == step.gradients.keys()
            assert [clip.limit for clip in step.clips] == [0.01]
        assert {one.name for one in facts.states if one.kind == "buffer"} == {"loss_of.center"}
    local = [row(f, f.steps[0].backwards[0].gradients["0/last.weight"]) for f in every]
    exchanged = row(every[0], every[0].steps[0].clips[0].gradients["0/last.weight"])
    assert np.allclose(np.mean(local, axis=0), exchanged, rtol=1e-5, atol=1e-7)
    (tmp_path / "alone").mkdir()
    (alone,), _ = observe(tmp_path / "alone", RETURNED, size=1)

    def compared():
        own = ReplayedSteps(every, alone, None, has_own_batches=True)
        return [own.joint(step) is not None for step in joint_steps(every)]

    assert all(compared()[:2])
    for batch in alone.batches:
        batch.contents = [[1 + one for one in column] for column in batch.contents]
    assert not any(compared())


OWN_HOOKS = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        _patch_model_state_dict, _patch_optimizer_state_dict
    )
    from torch.distributed.fsdp import FSDPModule
    import paceline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def move(parameter):  # as Megatron-LM does
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(move)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for part in range(3):
            F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 0, 1, 1])).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.clone()
            parameter.main_grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    _patch_model_state_dict(model)
    _patch_optimizer_state_dict(model, optimizers=optimizer)
    model.load_state_dict(model.state_dict())

    world = paceline.init(seed=0)
    other = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    world.distribute(other, other_optimizer, layout="zero3")

    import gc, inspect, types
    from torch.distributed.fsdp import fully_shard
    from tensorboardX.writer import SummaryWriter

    SummaryWriter().add_scalar(tag="loss", scalar_value=0.5)
    torch.amp.GradScaler("cpu").scale(outputs=torch.ones(1))

    def names(function, follows):
        every = inspect.signature(function, follow_wrapped=follows).parameters.values()
        named = [one.name for one in every if one.kind is one.POSITIONAL_OR_KEYWORD]
        return named[1:] if "self" in inspect.signature(function).parameters else named

    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and inspect.isfunction(
            getattr(one, "__wrapped__", None)
        ):
            folder = one.__code__.co_filename.rpartition("/paceline/")[2].partition("/")[0]
            if folder in ("record", "observe") and one.__name__[0] != "_":
                ours, theirs = names(one, False), names(one.__wrapped__, True)
                print(ours == theirs[: len(ours)], one.__qualname__, ours, theirs)
"""


def test_hooks_of_the_script_and_of_the_observer_do_not_disturb_each_other(tmp_path):
    (tmp_path / "tensorboardX").mkdir()
    writer = "class SummaryWriter:\n    def add_scalar(self, tag, scalar_value): pass\n"
    (tmp_path / "tensorboardX" / "writer.py").write_text(writer)
    (facts,), printed = observe(tmp_path, OWN_HOOKS, size=1)
    assert facts.ended == "script"  # the hooks are neither refused nor called wrongly
    assert not facts.unseen
    for step in facts.steps:  # all gradients of a step, also those that a hook has taken
        assert len(step.backwards) == 3
        for name, used in step.gradients.items():
            rows = [row(facts, one.gradients[name]) for one in step.backwards]
            assert np.allclose(np.sum(rows, axis=0), row(facts, used), rtol=1e-5, atol=1e-7)
    assert [one.what for one in facts.restores] == ["model"]
    wrapped = [one for one in ranks.untagged(printed) if one.split()[0] in ("True", "False")]
    assert len(wrapped) > 40
    assert not [one for one in wrapped if one.startswith("False")]  # arguments by name
    assert "loss: 5.000000e-01" in [one.text for one in facts.outputs]


PARTS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    policy, value = nn.Linear(4, 2), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.1)
    for step in range(3):  # both models get the same observations
        seen = torch.randn(6, 4)
        loss = policy(seen).square().mean() + value(seen).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 2)), batch_size=12)
    for epoch in range(2):  # every rank reads the global batch, and trains a part of it
        for x, y in loader:
            mine = slice(0, None, 2)
            for part in x[mine].split(3):
                policy(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_samples_are_those_that_the_models_get(tmp_path):
    (facts,), _ = observe(tmp_path, PARTS, size=1)
    assert not facts.unseen
    of_loader = [one for one in facts.batches if facts.loaders[one.loader].dataset]
    others = [one for one in facts.batches if not facts.loaders[one.loader].dataset]
    assert [one.samples for one in others] == [6] * 3
    assert [(one.samples, one.used) for one in of_loader] == [(12, 6)] * 4


def test_the_dataset_of_a_loader_of_paceline_is_found():
    loader = data.Loader((np.zeros((8, 2)), np.arange(8)), 4, num_workers=0)
    assert len(dataset_of(loader)) == 8
