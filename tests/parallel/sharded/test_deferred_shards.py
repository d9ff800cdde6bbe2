"""A deferred model in a sharded layout has the numbers of one process, and is never held whole."""

from pathlib import Path

import pytest
import ranks
import torch

import paceline

SCRIPTS = str(Path(paceline.__file__).parents[2] / "benchmarks/scripts/layouts")

MODELS = """
    import os, sys
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    import paceline

    layout, shard_over, out = sys.argv[1:4]
    if shard_over == "host":  # two ranks on each of two simulated hosts
        from paceline.parallel.sharded import fully_sharded
        fully_sharded.sharing_domain = lambda: f"host {int(os.environ['RANK']) // 2}"

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 6, padding_idx=0)
            layers = (nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0) for _ in range(2))
            self.layers = nn.ModuleList(layers)
            self.lstm, self.norm = nn.LSTM(6, 6), nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 11, bias=False)
            self.last.weight = self.table.weight
            self.frozen = nn.Linear(6, 5)
            self.frozen.requires_grad_(False)
            self.register_buffer("mask", torch.arange(6).float().sin() > 0)
            self.register_buffer("moments", torch.rand(4, 3))
            self.register_buffer("first", self.moments[0])
            both = torch.randn(5, 6)
            self.upper, self.lower = nn.Parameter(both[:3]), nn.Parameter(both[3:])
            self.loaded = nn.Parameter(torch.zeros(3))
            with torch.no_grad():
                self.loaded.copy_(torch.tensor([1.0, 2.0, 3.0]))
            nn.init.trunc_normal_(self.layers[0].linear1.weight, std=0.02)
            nn.init.orthogonal_(self.layers[1].linear2.weight)
            for parameter in self.parameters():
                parameter.data.mul_(0.5)
        def forward(self, numbers):
            x = self.table(numbers)
            for layer in self.layers:
                x = layer(x)
            x = self.norm(self.lstm(x)[0]) + self.frozen(x).sum(1, keepdim=True)
            return self.last(x) + (self.upper.sum() + self.lower.sum() + self.loaded.sum())

    world = paceline.init(seed=5, progress=False)
    torch.manual_seed(7 + world.rank)  # rank 0's numbers count
    with world.deferred():
        model = Mixed()
    after = torch.randn(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused="fused" in sys.argv)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = {"recompute": "blocks", "blocks": ["layers", "LSTM"]} if layout == "zero3" else {}
    options |= {"shard_over": shard_over} if layout != "data" else {}
    model, same = world.distribute(model, optimizer, layout=layout, **options)
    assert same is optimizer
    plain = getattr(model, "module", model)
    assert plain.last.weight is plain.table.weight
    assert plain.first.data_ptr() == plain.moments.data_ptr()
    assert not plain.frozen.weight.requires_grad
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters()))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))

    def state():
        how = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {name: t.clone() for name, t in get_model_state_dict(plain, options=how).items()}

    found = {"initial": state(), "after": after}
    numbers = (torch.arange(12) * 7 % 11)[world.rank :: world.size]
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(numbers), (numbers + 1) % 11)
        world.backward(loss)
        world.step(optimizer)
        scheduler.step()
    if world.rank == 0:
        torch.save({**found, "trained": state()}, out)
    else:
        state()
"""
ORDINARY = MODELS.replace("with world.deferred():", "if True:")


def found(folder, text, layout, number, shard_over="job", *more, launcher="paceline"):
    out = folder / f"{layout}-{number}-{len(text)}.pt"
    script = ranks.write(folder, text)
    ranks.run(script, layout, shard_over, out, *more, ranks=number, launcher=launcher)
    return torch.load(out)


def check(folder, layout, number, shard_over="job", *more):
    alone = found(folder, ORDINARY, "data", 1, launcher="python")
    result = found(folder, MODELS, layout, number, shard_over, *more)
    assert torch.equal(result["after"], alone["after"])
    assert list(result["initial"]) == list(alone["initial"])
    for name, tensor in alone["initial"].items():
        assert torch.equal(result["initial"][name], tensor), name
    ordinary = found(folder, ORDINARY, layout, number, shard_over, *more)
    for name, tensor in ordinary["trained"].items():
        assert torch.equal(result["trained"][name], tensor), name


@pytest.mark.long
def test_shards_have_the_numbers_of_an_ordinary_construction(tmp_path):
    check(tmp_path, "zero3", 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "number", "options"),
    [
        *((layout, 2, ["job", "fused"]) for layout in ("data", "zero1", "zero2", "zero3")),
        ("zero1", 3, ["job"]),
        ("zero2", 4, ["job"]),
        ("zero3", 4, ["job", "fused"]),
        ("zero3", 4, ["host"]),
    ],
)
def test_all_layouts_have_the_numbers_of_an_ordinary_construction(
    tmp_path, layout, number, options
):
    check(tmp_path, layout, number, *options)


MEMORY = """
    import gc, sys
    import torch, torch.distributed as dist
    from torch import nn
    import paceline
    sys.path.append(SCRIPTS)
    from allocator_peak import measure_growth
    from paceline.parallel.memory_budget import _status_bytes

    WIDTH, LAYERS = 1024, 24

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            for layer in self.layers:  # after all of them were made
                layer.weight.data.mul_(0.5)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    world = paceline.init(progress=False)
    one, whole = 4 * WIDTH**2, 4 * LAYERS * (WIDTH**2 + WIDTH)
    world.distribute(nn.Linear(4, 4), layout="zero3")  # loads FSDP
    dist.broadcast(torch.zeros(WIDTH, WIDTH), 0)  # buffers of the exchange
    models = []

    def build():
        with world.deferred():
            model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        models.append(world.distribute(model, optimizer, layout="zero3")[0])

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins here
    before = _status_bytes("VmRSS")
    build()
    resident = _status_bytes("VmHWM") - before
    assert resident <= whole / world.size + 4 * one, resident / one

    models.clear()
    gc.collect()
    growth = measure_growth(build)
    assert sum(p.to_local().nbytes for p in models[0].parameters()) <= whole / world.size + 1e6
    assert growth <= whole / world.size + 2 * one + 1e6, growth / one
    print("measured", growth / one, resident / one, flush=True)
"""


def test_no_rank_holds_more_than_its_shards_and_a_tensor(tmp_path):
    """In PyTorch's allocator, and in the resident set, which also counts what malloc holds."""
    done = ranks.run(ranks.write(tmp_path, MEMORY.replace("SCRIPTS", repr(SCRIPTS))), ranks=4)
    assert "measured" in done.stdout


DIFFERENT = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    with world.deferred():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if world.rank == 1 else 6))
    world.distribute(model, layout="zero3")
"""


def test_ranks_with_different_models_are_named(tmp_path):
    result = ranks.run(ranks.write(tmp_path, DIFFERENT), ranks=3, check=False)
    assert "the Sequential of world.deferred() has other tensors on rank 1 than" in result.stderr


SOME = """
    import contextlib
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    torch.manual_seed(3)
    with world.deferred() if world.rank else contextlib.nullcontext():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    model = world.distribute(model, layout="zero3")
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    for one, other in zip(model.parameters(), expected.parameters()):
        assert torch.equal(one.full_tensor(), other)
"""


def test_model_that_is_deferred_on_some_ranks_only(tmp_path):
    ranks.run(ranks.write(tmp_path, SOME), ranks=2)


ALIASED = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    with world.deferred():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
        model.register_buffer("alias", model[1].bias.detach()[:2])
    world.distribute(model, layout="zero3")
"""


def test_buffer_in_the_memory_of_a_parameter_is_an_error(tmp_path):
    result = ranks.run(ranks.write(tmp_path, ALIASED), check=False)
    assert "the buffer alias shares memory with the parameter 1.bias. HINT: " in result.stderr
