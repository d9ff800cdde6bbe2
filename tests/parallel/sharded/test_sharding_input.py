"""Bad input of sharded layouts gets a clear line before the first step, on one rank too."""

import pytest
import torch
from torch import nn

import paceline


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
        ({"layout": "zero4"}, "layout must be one of 'data', 'zero1', .*HINT: layout='zero"),
        ({"layout": "zero2", "find_unused_parameters": True}, "does not have the option find_"),
        ({"layout": "zero3", "blocks": ["Linea"]}, "blocks contains 'Linea'.*'Linear'"),
        ({"layout": "zero3", "shard_over": "hosts"}, "HINT: shard_over='host'"),
        (
            {"layout": "zero3", "offload": "parameter"},
            "offload must be.*HINT: offload='parameters'",
        ),
        ({"layout": "zero3", "offload": "parameters"}, "computes on the CPU. HINT: leave offload"),
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


def test_one_rank_leaves_model_and_optimizer_unchanged(world):
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    assert world.distribute(plain, optimizer, layout="zero3") == (plain, optimizer)
    assert type(plain) is nn.Sequential
