"""What ``world`` promises holds in sharded layouts."""

import pytest
import ranks
import torch

SCRIPT = """
    import os, sys
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
    from torch.distributed.tensor import DTensor
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    HOSTS = "hosts" in sys.argv
    if HOSTS:  # two ranks on each of two simulated hosts
        from paceline.parallel.sharded import fully_sharded
        fully_sharded.sharing_domain = lambda: f"host {int(os.environ['RANK']) // 2}"
    world = paceline.init(seed=5, progress=False)
    OPTIONS = {"shard_over": "host"} if HOSTS else {}

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in "ab")
            self.last = nn.Linear(6, 10, bias=False)
            self.last.weight = self.table.weight
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(()) + world.rank)
        def encode(self, numbers):
            x = self.table(numbers)
            for layer in self.layers:
                x = layer(x)
            return self.frozen(x)
        def forward(self, numbers):
            return self.last(self.encode(numbers))

    def whole(model):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(getattr(model, "module", model), options=options)

    def made(layout, make=Tied, **more):
        torch.manual_seed(7)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        more |= OPTIONS if layout != "data" else {}
        return world.distribute(model, optimizer, layout=layout, **more)

    numbers = (torch.arange(8) * 7 % 10)[world.rank :: world.size]
    results = {}
    for layout in ("data", "zero1", "zero2", "zero3"):
        model, optimizer = made(layout)
        plain = getattr(model, "module", model)
        for _ in range(3):
            world.backward(nn.functional.cross_entropy(model(numbers), (numbers + 1) % 10))
            world.step(optimizer, clip=0.1)
        assert float(plain.seen) == 0  # rank 0's buffers
        encoded = plain.encode(numbers)  # a method that is not forward
        world.backward(encoded.square().mean() + model(numbers).square().mean())
        world.step(optimizer)
        results[layout, "tied"] = whole(model)
        if layout != "data":
            assert plain.last.weight is plain.table.weight
            assert isinstance(plain.table.weight, DTensor)
            names = set(get_optimizer_state_dict(plain, optimizer)["param_groups"][0]["params"])
            assert "layers.0.0.weight" in names

        # a pair of models with an optimizer each, one of which judges the other's output
        g, g_optimizer = made(layout, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
        d, d_optimizer = made(layout, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))
        noise = torch.arange(24.0).view(8, 3)[world.rank :: world.size] / 24
        for _ in range(3):
            d_optimizer.zero_grad()
            world.backward(d(noise).mean() - d(g(noise).detach()).mean())
            world.step(d_optimizer)
            g_optimizer.zero_grad()
            world.backward(d(g(noise)).square().mean())
            world.step(g_optimizer)
        results[layout, "pair"] = {**whole(g), **{"d" + n: t for n, t in whole(d).items()}}

        # a loop that is left inside an accumulation discards its gradients
        model, optimizer = made(layout, accumulate=3)
        loader = world.shard(DataLoader(TensorDataset(torch.arange(10)), batch_size=1))
        for batch, (n,) in enumerate(world.batches(loader)):
            world.backward(model(n).square().sum())
            world.step(optimizer)
            if batch == 0:
                break
        assert all(p.grad is None for p in model.parameters())
        for (n,) in world.batches(loader):
            world.backward(model(n).square().mean())
            world.step(optimizer)
        results[layout, "accumulated"] = whole(model)
    if world.rank == 0:
        torch.save(results, sys.argv[1])
"""


def compare(results, layouts, like="data"):
    for layout in layouts:
        for (of, part), state in results.items():
            if of == layout:
                reference = results[like, part]
                assert list(state) == list(reference)
                for name, tensor in reference.items():
                    torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)


def run(folder, number, *args):
    out = folder / "out.pt"
    ranks.run(ranks.write(folder, SCRIPT), out, *args, ranks=number)
    return torch.load(out)


def test_tied_frozen_pairs_methods_and_discarded_groups(tmp_path):
    compare(run(tmp_path, 3), ["zero1", "zero2", "zero3"])


def test_shards_within_a_host_and_replicas_between(tmp_path):
    compare(run(tmp_path, 4, "hosts"), ["zero1", "zero2", "zero3"])


NONFINITE = """
    import sys
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
        def forward(self, x):
            first = self.layers[0](x)
            if world.rank == 1:  # only the gradient of layer 0 becomes infinite
                first.register_hook(lambda gradient: gradient * float("inf"))
            return self.layers[1](first)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = world.distribute(model, optimizer, layout=sys.argv[1])
    world.backward(model(torch.ones(2, 3)).sum())
    world.step(optimizer)
"""


@pytest.mark.parametrize(
    "layout", ["zero3", *(pytest.param(n, marks=pytest.mark.long) for n in ("zero1", "zero2"))]
)
def test_gradient_that_is_not_finite_is_named_before_its_exchange(tmp_path, layout):
    result = ranks.run(ranks.write(tmp_path, NONFINITE), layout, check=False)
    assert result.returncode
    assert "the gradient of layers.0.0." in result.stderr
    assert "is not finite on rank 1 at step 0" in result.stderr


DIVERGED = """
    import os, sys
    import torch
    from torch import nn
    import paceline
    from paceline.parallel.sharded import fully_sharded

    fully_sharded.sharing_domain = lambda: f"host {int(os.environ['RANK']) // 2}"
    world = paceline.init(progress=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = world.distribute(model, optimizer, layout="zero3", shard_over="host")
    for epoch in world.epochs(2):
        world.backward(model(torch.ones(2, 3)).sum())
        world.step(optimizer)
        if world.rank == 3:
            model[1].weight.to_local().data.add_(1)
"""


def test_replicas_of_shards_that_diverge_are_named(tmp_path):
    result = ranks.run(ranks.write(tmp_path, DIVERGED), ranks=4, check=False)
    assert "rank 3's shard of 1.weight differs from rank 1's" in result.stderr
    assert "HINT: find code" in result.stderr


PRECISION = """
    import torch
    from torch import nn
    from torch.optim import Optimizer
    import paceline
    from paceline.optim.gradients import LossScaling

    world = paceline.init(progress=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = world.distribute(model, optimizer, layout="zero3")
    scaling = LossScaling("cpu", [optimizer])
    before = [p.to_local().clone() for p in model.parameters()]
    loss = scaling.scaler.scale(model(torch.ones(2, 3)).sum())
    loss.backward()
    if world.rank == 0:
        model[0].weight.grad.to_local()[0, 0] = float("inf")
    scaling.before_step(optimizer, unscale=True)
    assert not scaling.step(optimizer)  # on every rank
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before))
    assert scaling.scaler.get_scale() == 32768.0
    scaling.scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaling.before_step(optimizer, unscale=True)
    assert scaling.step(optimizer)
"""


STALE = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = world.distribute(model, layout="zero3")
    world.backward(model(torch.ones(2, 3)).sum())
    later = torch.optim.SGD(model.parameters(), lr=1.0)
    assert world.step(later)  # created for the shards
    world.backward(model(torch.ones(2, 3)).sum())
    world.step(optimizer)
"""


def test_optimizer_that_was_not_given_to_distribute(tmp_path):
    result = ranks.run(ranks.write(tmp_path, STALE), check=False)
    assert "the SGD was created for whole parameters" in result.stderr


def test_float16_skips_a_step_on_all_ranks_where_one_shard_is_infinite(tmp_path):
    ranks.run(ranks.write(tmp_path, PRECISION), ranks=3)
