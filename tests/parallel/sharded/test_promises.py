"""What ``world`` promises holds in sharded layouts: one script on two ranks tries it all."""

import ranks
import torch

SCRIPT = """
    import contextlib, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
    from torch.distributed.tensor import DTensor
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    HOSTS = "hosts" in sys.argv
    if HOSTS:  # two ranks on each of two simulated hosts
        from paceline.comm.shared import memory
        from paceline.parallel.sharded import meshes
        import os
        meshes.sharding_domain = lambda: f"host {int(os.environ['RANK']) // 2}"
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

    def message(action):
        try:
            action()
        except ValueError as error:
            return str(error)
        return ""

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

        # a gradient that is not finite is named by rank and parameter, before any step
        model, optimizer = made(layout)
        plain = getattr(model, "module", model)
        def spoil():
            output = model(numbers)
            if world.rank == 1:
                output.register_hook(lambda gradient: gradient * float("inf"))
            world.backward(output.square().mean())
        found = message(spoil) if world.size == 2 else ""
        if world.rank == 1 and world.size == 2:
            assert "the gradient of " in found and "on rank 1 at step" in found, found
            print(layout, found, file=sys.stderr)
        break_here = world.size == 2 and layout == sys.argv[2]
        if break_here:
            break
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
    compare(run(tmp_path, 3, "none"), ["zero1", "zero2", "zero3"])


def test_shards_within_a_host_and_replicas_between(tmp_path):
    compare(run(tmp_path, 4, "none", "hosts"), ["zero1", "zero2", "zero3"])
