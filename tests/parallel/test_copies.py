"""Copies, averages, pickles and states of a distributed model, on any number of ranks."""

import pytest
import ranks
import torch

SCRIPT = """
    import copy, io, pickle, sys
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    import paceline

    world = paceline.init(progress=False, precision=sys.argv[2])
    RECOMPUTE = sys.argv[3] if len(sys.argv) > 3 else None
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 3)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in "ab")
            self.norm = nn.BatchNorm1d(3, momentum=0.0)
            self.scale = 1.0
        def encode(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) * self.scale
        def forward(self, x):
            return self.encode(x)
    sys.modules["__main__"].Net = Net

    plain = Net()
    initial = copy.deepcopy(plain.state_dict())
    before = AveragedModel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model, optimizer = world.distribute(plain, optimizer, recompute=RECOMPUTE)
    decay = get_ema_multi_avg_fn(0.5)
    averages = [before, AveragedModel(model), AveragedModel(model, multi_avg_fn=decay)]
    twin, shallow = copy.deepcopy(model), copy.copy(model)
    x = torch.arange(32.0).view(8, 4).sin()[world.rank :: world.size]
    model.scale = 2.0
    assert plain.scale == 2.0 and twin.scale == 1.0
    for _ in range(3):
        world.backward((model.encode(x).square().mean(0) * torch.arange(3.0)).sum())
        world.step(optimizer)
        for average in averages:
            average.update_parameters(model)
    kinds = [type(one).__name__ for one in (twin, shallow)]
    assert all(torch.equal(twin.state_dict()[n], initial[n]) for n in initial), "the twin changed"
    twin.eval()(x), averages[1].eval()(x)

    saved = io.BytesIO()
    torch.save(model, saved)
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    assert torch.equal(loaded.eval()(x).float(), plain.eval()(x).float())
    words = pickle.dumps(model)

    keys = list(model.state_dict())
    prefixed = {f"module.{name}": value for name, value in initial.items()}
    found = []
    for state in (initial, prefixed):
        model.load_state_dict({n: v + 1 for n, v in state.items()})
        model.load_state_dict(state)
        found.append(all(torch.equal(model.state_dict()[n], v) for n, v in initial.items()))
    outer = nn.Sequential(model)
    outer.load_state_dict(outer.state_dict())
    set_model_state_dict(model, get_model_state_dict(model))
    result = {
        "kinds": kinds, "keys": keys, "outer": list(outer.state_dict()), "found": found,
        "dcp": list(get_model_state_dict(model)), "loaded": list(loaded.state_dict()),
        "needs": [name for name in ("paceline", "mmap") if name.encode() in words],
        "averages": [average.state_dict() for average in averages],
    }
    if world.rank == 0:
        torch.save(result, sys.argv[1])
"""


def result_of(folder, number, launcher, *options):
    script, out = ranks.write(folder, SCRIPT), folder / f"{number}.pt"
    ranks.run(script, out, *options, ranks=number, launcher=launcher)
    return torch.load(out)


@pytest.mark.parametrize("options", [("fp32",), ("fp32", "blocks"), ("bf16",)])
def test_copies_and_states_are_those_of_the_plain_model(tmp_path, options):
    alone = result_of(tmp_path, 1, "python", *options)
    shared = result_of(tmp_path, 2, "paceline", *options)
    assert alone["kinds"] == ["Net", "Net"]
    assert alone["keys"] == alone["dcp"] == alone["loaded"]
    assert alone["found"] == [True, True]
    if options[0] == "fp32":  # with bf16, forward is Paceline's
        assert alone["needs"] == []
    averages = [one.pop("averages") for one in (alone, shared)]
    assert shared == alone
    for one, other in zip(*averages, strict=True):
        assert list(one) == list(other)
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)


SHARDED = """
    import copy, pickle, sys
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = world.distribute(model, optimizer, layout="zero3")
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    if sys.argv[1] == "deepcopy":
        copy.deepcopy(model)
    if sys.argv[1] == "average":
        torch.optim.swa_utils.AveragedModel(model)
    if sys.argv[1] == "before":
        before.update_parameters(model)
    if sys.argv[1] == "pickle":
        pickle.dumps(model)
"""


@pytest.mark.parametrize("what", ["deepcopy", "average", "before", "pickle"])
def test_copy_of_a_sharded_model_is_an_error_with_a_way_to_average(tmp_path, what):
    script = ranks.write(tmp_path, SHARDED)
    result = ranks.run(script, what, ranks=2, check=False)
    assert result.returncode == 1
    assert "average = [p.detach().clone() for p in model.parameters()]" in result.stderr
    assert "Traceback" not in result.stderr
