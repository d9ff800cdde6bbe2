"""Bad input of sharded layouts gets a clear line before the first step, on one rank too."""

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import paceline
from paceline.knobs import knob, layouts
from paceline.parallel.mesh import Mesh
from paceline.parallel.sharded.layouts import NEEDS_WHOLE_PARAMETERS
from paceline.world.layouts.distribution import LayoutArguments


@pytest.fixture
def world(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    made = paceline.init(progress=False, record=False)
    yield made
    made.close()


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))


def scalar():
    made = model()
    made.register_parameter("scale", nn.Parameter(torch.ones(())))
    return made


def hooked():
    made = model()
    made[0].weight.register_hook(lambda gradient: gradient)
    return made


def aliased():
    made = model()
    made.register_buffer("alias", made[1].bias.detach()[:2])
    return made


def mixed():
    made = model()
    made[1].double()
    return made


def transposed():
    made = model()
    made[0].weight = nn.Parameter(torch.ones(3, 4).t())
    return made


def wrapped():
    from torch.distributed.fsdp import FSDPModule

    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *_, **__):
            return nn.Linear.__new__(cls)

    return Sharded(2, 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (scalar, "the parameter scale has no dimension.*HINT: make it a tensor of shape"),
        (hooked, "the parameter 0.weight has a hook.*HINT: register the hook after"),
        (aliased, "the buffer alias shares memory with the parameter 1.bias.*HINT: compute"),
        (mixed, r"several dtypes: float64 \(1.weight\) and float32 \(0.weight\).*HINT"),
        (transposed, "the parameter 0.weight is not contiguous.*HINT"),
        (lambda: nn.LazyLinear(3), "the parameter weight has no shape yet.*HINT: run one forward"),
        (lambda: nn.Embedding(3, 2, sparse=True), "has sparse gradients.*HINT: sparse=False"),
        (wrapped, "the model is distributed already.*HINT: give the plain model"),
    ],
)
def test_model_that_cannot_be_sharded(world, make, said):
    with pytest.raises(ValueError, match=said):
        world.distribute(make(), layout="zero3")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "zero4"}, "layout='zero4': there is no sharding level 4. HINT: zero1"),
        ({"layout": "tp1 x dp2"}, "'dp2' needs 2 ranks, and the job has 1. HINT: start 2 ranks"),
        ({"layout": paceline.Layout(h=1, zero=3), "blocks": ["Linea"]}, "blocks contains 'Linea'"),
        (
            {"layout": "zero3 + recompute", "recompute": "selective"},
            "contradicts .*HINT: leave",
        ),
        ({"layout": "data", "shard_over": "host"}, "shard_over='host' needs a layout that shards"),
        ({"layout": "zero2", "find_unused_parameters": True}, "does not have the option find_"),
        ({"layout": "zero3", "blocks": ["Linea"]}, "blocks contains 'Linea'.*'Linear'"),
        ({"layout": "zero3", "shard_over": "hosts"}, "HINT: shard_over='host'"),
        (
            {"layout": "zero3", "offload": "parameter"},
            "offload must be.*HINT: offload='parameters'",
        ),
        ({"layout": "zero3", "offload": "parameters"}, "computes on the CPU. HINT: leave offload"),
        (
            {"offload": "optimizer"},
            "offload='optimizer' needs the optimizer. HINT: model, optimizer",
        ),
        ({"layout": "data", "offload": "parameters"}, "offload='parameters' needs a layout.*HINT"),
        ({"layout": "data", "blocks": ["0"]}, r"blocks=\['0'\] needs a layout that shards.*HINT"),
    ],
)
def test_options(world, options, said):
    with pytest.raises(ValueError, match=said):
        world.distribute(model(), **options)


def test_optimizer_for_other_parameters(world):
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"SGD holds none of the model's parameters.*HINT: create"):
        world.distribute(model(), optimizer, layout="zero2")


@pytest.mark.parametrize("kind", NEEDS_WHOLE_PARAMETERS)
def test_optimizer_that_needs_whole_parameters(world, kind):
    made = nn.Linear(3, 4, bias=False)
    optimizer = getattr(torch.optim, kind)(made.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"{kind} can't update the shards.*HINT: layout='data'"):
        world.distribute(made, optimizer, layout="zero1")
    assert world.distribute(made, optimizer, layout="data") == (made, optimizer)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_budget_that_no_layout_meets_states_the_least(world):
    made, x = Repeated(), torch.ones(8, 64)
    optimizer = torch.optim.Adam(made.parameters())
    options = {"layout": "auto", "memory_budget": 1e-5, "example_inputs": x}
    with pytest.raises(ValueError, match=r"no layout fits .*: the least is \d.* with data.*HINT"):
        world.distribute(made, optimizer, **options)


def test_budget_that_no_recomputation_meets_states_the_least(world):
    made, x = Repeated(), torch.ones(8, 64)
    options = {"recompute": "auto", "recomputed_blocks": ["layers"], "memory_budget": 1e-5}
    distributed = world.distribute(made, layout="zero3", **options)
    with pytest.raises(ValueError, match=r"below .*HINT: memory_budget=0\.0"):
        distributed(x)


def test_one_rank_leaves_model_and_optimizer_unchanged(world):
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    assert world.distribute(plain, optimizer, layout="zero3") == (plain, optimizer)
    assert type(plain) is nn.Sequential


def test_pytorch_in_which_sharding_was_not_compared_with_one_process(world, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1+cpu"))
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"zero1.* needs PyTorch 2.11 or later; this is 2.10.1"):
        world.distribute(made, optimizer, layout="zero1")


def test_layout_of_the_settings_replaces_the_scripts(world, monkeypatch):
    """What the new layout does not have of the script's options is left out."""
    turned = knob.KnobResult("layout")
    monkeypatch.setattr(knob, "_requests", {})
    layouts.set_layout("zero2 + recompute", turned)
    asked = LayoutArguments(
        "data",
        Mesh(0, 1),
        torch.device("cpu"),
        None,
        "job",
        None,
        None,
        None,
        {"static_graph": True},
    )
    found = asked.of_settings()
    assert (found.known, found.options) == (paceline.Layout(zero=2, recompute="blocks"), {})
    assert turned.set
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    world.distribute(made, optimizer, find_unused_parameters=True)
    assert str(world._layouts[-1].layout) == "zero2 + recompute"
