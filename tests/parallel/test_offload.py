"""Offloaded optimizer states: the plain result bit for bit, with a chunk of them on the device."""

import warnings

import pytest
import ranks
import torch
from torch import nn

from paceline.parallel import offload
from paceline.parallel.offload import offload_states

CPU = torch.device("cpu")
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "loop": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_BYTES", 100)


def made(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1))
    model[2].bias.requires_grad_(False)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2:].parameters()], "lr": 0}]
    groups[1]["lr"] = 0.05
    if kind == "lbfgs":
        groups = list(model.parameters())
    return model, OPTIMIZERS[kind](groups)


def train(model, optimizer, steps):
    x = torch.arange(12.0).view(4, 3) / 12

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def same(one, other):
    flat = (
        torch.utils._pytree.tree_leaves([m.state_dict(), o.state_dict()]) for m, o in (one, other)
    )
    pairs = list(zip(*flat, strict=True))
    return len(pairs) > 8 and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_result_and_states(kind):
    plain, offloaded = made(kind), made(kind)
    offload_states(offloaded[1], CPU)
    train(*plain, 4)
    train(*offloaded, 4)
    assert same(plain, offloaded)


@pytest.mark.parametrize("begins_with_offload", [True, False])
@pytest.mark.parametrize("kind", ["adam", "fused", "momentum", "asgd"])
def test_state_dict_continues_with_and_without_offload(kind, begins_with_offload):
    whole, first, then = made(kind), made(kind), made(kind)
    offload_states((first if begins_with_offload else then)[1], CPU)
    train(*whole, 5)
    train(*first, 2)
    for part, of in zip(then, first, strict=True):
        part.load_state_dict(of.state_dict())
    train(*then, 3)
    assert same(whole, then)


def test_device_has_the_states_of_one_chunk(monkeypatch):
    """A state's memory of the host is the same after each step, and not in use by the step."""
    model, optimizer = made("adam")
    offload_states(optimizer, CPU)
    train(model, optimizer, 1)
    home = {t.data_ptr(): t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim()}
    seen = []

    def spied(*args, **options):
        held = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        seen.append(sum(t.nbytes for t in held if t.data_ptr() not in home))
        return plain(*args, **options)

    offloaded = offload._offloaded[optimizer]
    plain = offloaded._step_parameters
    monkeypatch.setattr(offloaded, "_step_parameters", spied)
    train(model, optimizer, 2)
    after = {
        t.data_ptr(): t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim()
    }
    assert after == home
    # three states of each parameter with a gradient: of 60 + 20 and 80 + 16 + 4 bytes
    assert seen == [240, 300] * 2


def test_hooks_and_schedulers_see_one_step_of_all_parameters():
    model, optimizer = made("adam")
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []

    def note(which):
        return lambda optimizer, *_: seen.append(
            (which, sum(len(g["params"]) for g in optimizer.param_groups))
        )

    optimizer.register_step_pre_hook(note("pre"))
    offload_states(optimizer, CPU)
    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)
        early.step()
        late.step()
    assert seen == [("pre", 6), ("pre", 6), ("post", 6)]
    assert [g["lr"] for g in optimizer.param_groups] == [0.025, 0.0125]


def test_step_that_fails_leaves_groups_and_states_whole(monkeypatch):
    model, optimizer = made("adam")
    offload_states(optimizer, CPU)
    train(model, optimizer, 1)
    before = {key: dict(state) for key, state in optimizer.state.items()}

    def failing(*_):
        raise RuntimeError("out of memory")

    offloaded = offload._offloaded[optimizer]
    monkeypatch.setattr(offloaded, "_step_parameters", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, optimizer, 1)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 6
    assert all(optimizer.state[p][n] is t for p, s in before.items() for n, t in s.items())


class Global(torch.optim.SGD):
    """An optimizer that is not PyTorch's, and whose step depends on all parameters together."""

    def step(self, closure=None):
        norm = sum(
            p.grad.square().sum()
            for g in self.param_groups
            for p in g["params"]
            if p.grad is not None
        )
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state.setdefault(p, {"mean": torch.zeros_like(p)})
                        state["mean"].lerp_(p.grad / norm, 0.1)
                        p.sub_(state["mean"])


def test_unknown_optimizer_steps_all_parameters_together():
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        optimizer = Global(model.parameters(), lr=0.1)
        if offloads:
            offload_states(optimizer, CPU)
        train(model, optimizer, 3)
        results.append((model, optimizer))
    assert same(*results)


SCRIPT = """
    import itertools, sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.optim.gradients import LossScaling
    from paceline.parallel import offload

    offload.CHUNK_BYTES = 200
    world = paceline.init(seed=5, progress=False)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(43, 6, generator=g)
    y = (x[:, :2].sum(1) > 0).long()
    loader = world.shard(DataLoader(TensorDataset(x, y), shuffle=True), global_batch=12)
    OPTIMIZERS = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    }

    def parts(model, optimizer):
        states = [t for s in optimizer.state.values() for t in s.values()]
        tensors = [*model.parameters(), *states]
        return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]

    def train(layout, name, offload):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in "abc")
        model = nn.Sequential(*layers, nn.Linear(6, 2))
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        how = {"accumulate": 2, "layout": layout, "offload": offload}
        model, same = world.distribute(model, optimizer, **how)
        assert same is optimizer
        torch.manual_seed(3 + world.rank)
        for epoch in world.epochs(2):
            for images, labels in world.batches(loader):
                world.backward(F.cross_entropy(model(images), labels))
                world.step(optimizer, clip=0.2)
            scheduler.step()
        # loss scaling: a step that is skipped, because a gradient is infinite, and one that is not
        scaling = LossScaling("cpu", [optimizer])
        for infinite in (True, False):
            scaling.scaler.scale(F.cross_entropy(model(x[:4]), y[:4])).backward()
            if infinite and (layout == 'data' or world.rank == 0):
                gradient = next(model.parameters()).grad
                gradient = getattr(gradient, "_local_tensor", gradient)
                gradient.view(-1)[0] = float("inf")
            scaling.before_step(optimizer, unscale=True)
            scaling.step(optimizer)
        return parts(model, optimizer)

    for layout, name in itertools.product(sys.argv[1].split(","), sys.argv[2].split(",")):
        plain, offloaded = train(layout, name, None), train(layout, name, "optimizer")
        assert len(plain) == len(offloaded) > 12
        equal = all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
        print(f"{layout} {name} {equal}", flush=True)
"""


def check_ranks(folder, number, layouts, optimizers):
    launcher = "paceline" if number > 1 else "python"
    done = ranks.run(
        ranks.write(folder, SCRIPT),
        ",".join(layouts),
        ",".join(optimizers),
        ranks=number,
        launcher=launcher,
    )
    found = {line for line in ranks.untagged(done.stdout) if line.endswith(("True", "False"))}
    assert found == {f"{layout} {name} True" for layout in layouts for name in optimizers}


def test_layouts_with_offload_equal_those_without(tmp_path):
    check_ranks(tmp_path, 2, ["data", "zero1", "zero3"], ["adam"])


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_all_layouts_and_optimizers_with_offload(tmp_path, number):
    check_ranks(
        tmp_path, number, ["data", "zero1", "zero2", "zero3"], ["adam", "momentum", "fused"]
    )


RESUMED = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.parallel import offload

    offload.CHUNK_BYTES = 200
    layout, offload, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    world = paceline.init(seed=1, progress=False)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Dropout(), nn.Linear(7, 7), nn.Linear(7, 1))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    offload = None if offload == "None" else offload
    model, optimizer = world.distribute(model, optimizer, layout=layout, offload=offload)
    data = torch.randn(96, 5, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), shuffle=True)
    loader = world.shard(loader, global_batch=12)
    for epoch in world.epochs(2, checkpoint="ckpt", every=1):
        for x, y in world.batches(loader):
            world.backward((model(x) - y).square().mean())
            world.step(optimizer, clip=1.0)
            last -= 1
            if last == 0:
                sys.exit(0)
    states = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in states]
    if world.rank == 0:
        torch.save([t.detach() for t in whole], "end.pt")
"""


def end_of(folder, layout, number, *runs):
    """Return the state at the end of a training; each run but the last stops after its steps."""
    folder.mkdir()
    for offload_option, steps in runs:
        ranks.run(ranks.write(folder, RESUMED), layout, offload_option, steps, ranks=number)
    return torch.load(folder / "end.pt")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ("zero3", 2),
        pytest.param("data", 1, marks=pytest.mark.long),
        pytest.param("data", 3, marks=pytest.mark.long),
        pytest.param("zero1", 4, marks=pytest.mark.long),
        pytest.param("zero2", 3, marks=pytest.mark.long),
    ],
)
def test_checkpoints_continue_with_and_without_offload(tmp_path, layout, number):
    whole = end_of(tmp_path / "whole", layout, number, ("None", -1))
    runs = [("optimizer", 5), ("None", 5), ("optimizer", -1)]
    found = end_of(tmp_path / "stopped", layout, number, *runs)
    assert len(found) == len(whole) == 4 * 6
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
