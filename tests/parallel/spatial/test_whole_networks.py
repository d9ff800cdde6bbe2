"""Whole networks train on parts of samples as on one rank: outputs, gradients, ten steps."""

import functools

import pytest
import thread_ranks
import torch
import whole_networks
from torch.distributed.tensor import DTensor

FORWARD, TEN_STEPS = 1e-12, 1e-10  # relative differences that are accepted, in float64
STEPS = 10


def train(world, network, layout):
    """Return outputs and gradients of the first step, and losses and weights after all."""
    torch.manual_seed(0)
    model = network.make().double()
    x, target = torch.randn(network.shape, dtype=torch.float64), network.target()
    if target.is_floating_point():
        target = target.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = world.distribute(
        *(model, optimizer),
        layout=layout,
        blocks=["Sequential"] if "zero" in layout else None,
        compare=False,
    )
    torch.manual_seed(5)  # for dropout
    first, losses = {}, []
    for step in range(STEPS):
        outputs = model(x)
        loss = network.loss(outputs, target)
        world.backward(loss)
        if not step:
            first["outputs"] = world.whole(outputs).detach()
            first |= {
                f"gradient of {name}": whole(parameter.grad)
                for name, parameter in plain(model).named_parameters()
            }
        world.step(optimizer)
        losses.append(loss.item())
    after = {name: whole(value) for name, value in plain(model).state_dict().items()}
    return first, after | {"losses": torch.tensor(losses)}


def whole(tensor):
    """Return a copy of a tensor; the whole one of a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def plain(model):
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


@functools.cache
def expected(size, name):
    network = getattr(whole_networks, size)[name]
    return thread_ranks.alone(functools.partial(train, network=network, layout="data"))


def differences(found, wanted, limit):
    """Return what differs by more than a limit, relative to its norm."""
    wrong = {}
    for name, value in wanted.items():
        distance = (found[name].double() - value.double()).norm() / value.double().norm()
        if not distance <= limit:
            wrong[name] = distance.item()
    return wrong


def check(size, name, layout, ranks):
    network = getattr(whole_networks, size)[name]
    first, after = expected(size, name)
    call = functools.partial(train, network=network, layout=layout)
    for mine, mine_after in thread_ranks.run(call, ranks):
        assert differences(mine, first, FORWARD) == {}
        assert differences(mine_after, after, TEN_STEPS) == {}


@pytest.mark.parametrize("layout", [pytest.param("two", marks=pytest.mark.long), "four"])
@pytest.mark.parametrize("name", whole_networks.SMALL)
def test_a_network_on_parts_equals_one_rank(name, layout):
    dims = len(whole_networks.SMALL[name].shape) - 2
    layouts = {"two": ("d2", 2), "four": ("d2 x w2", 4)}
    if dims == 2:
        layouts = {"two": ("h2", 2), "four": ("h2 x w2", 4)}
    check("SMALL", name, *layouts[layout])


@pytest.mark.parametrize("layout", ["zero1 x h2", "zero2 x w2 x dp1", "zero3 x h2"])
def test_states_are_sharded_over_the_ranks_of_a_sample(layout):
    check("SMALL", "unet 2-D", layout, 2)


@pytest.mark.long
@pytest.mark.parametrize("name", whole_networks.LARGE)
def test_larger_networks_on_up_to_eight_parts_equal_one_rank(name):
    layouts = [("w3", 3), ("h4", 4), ("h2 x w4", 8)]
    if len(whole_networks.LARGE[name].shape) == 5:
        layouts = [("h3", 3), ("d4", 4), ("d2 x h2 x w2", 8)]
    for layout, ranks in layouts:
        check("LARGE", name, layout, ranks)
