"""Checks of broadcast_parameters, broadcast_optimizer_state, objects, and SyncBatchNorm."""

import collections
import copy
import math

import numpy as np
import pytest
import torch
from horovod_checks import check, main, process_set_of
from torch import nn

import paceline.compat.horovod.torch as hvd

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
}


def new_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def equal(one, other):
    """Compare trees with tensors exactly."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        same = len(one) == len(other) and all(map(equal, one, other))
        return same and type(one) is type(other)
    return one == other and type(one) is type(other)


def last():
    return hvd.size() - 1


@check
def state_dict_is_broadcast():
    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))

    mine, root = model(hvd.rank()), model(last())
    mine[1].num_batches_tracked += hvd.rank()
    root[1].num_batches_tracked += last()
    hvd.broadcast_parameters(mine.state_dict(), root_rank=last())
    assert equal(dict(mine.state_dict()), dict(root.state_dict()))


@check
def named_parameters_and_parameters_are_broadcast():
    for select in (
        lambda model: list(model.named_parameters()),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
    ):
        mine = new_model(10 + hvd.rank())
        hvd.broadcast_parameters(select(mine), root_rank=0)
        assert equal(dict(mine.state_dict()), dict(new_model(10).state_dict()))


@check
def tensors_of_any_kind_are_broadcast():
    def tensors(rank):
        return {
            "half": torch.full((3,), rank + 0.5, dtype=torch.float16),
            "integer": torch.full((2, 2), rank, dtype=torch.int64),
            "flag": torch.tensor([rank % 2 == 0, True]),
            "scalar": torch.tensor(float(rank)),
            "strided": torch.full((4, 3), float(rank)).t(),
            "empty": torch.empty(0),
        }

    mine = tensors(hvd.rank())
    hvd.broadcast_parameters(mine, root_rank=0)
    assert equal(mine, tensors(0))


@check
def invalid_parameters_are_refused():
    for params in (None, torch.ones(2), "model"):
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters(params, root_rank=0)
    with pytest.raises(ValueError, match="invalid params of type: Linear"):
        hvd.broadcast_parameters(nn.Linear(1, 1), root_rank=0)
    with pytest.raises(
        ValueError, match=r"lr is of type float, not a tensor. HINT: hvd.broadcast_object"
    ):
        hvd.broadcast_parameters({"lr": 0.1}, root_rank=0)


@check
def state_of_each_optimizer_is_broadcast():
    for name, kind in OPTIMIZERS.items():
        dims = {"Muon"}  # for matrices only
        model, other = new_model(hvd.rank()), new_model(0)
        parameters = [
            [one for one in each.parameters() if name not in dims or one.dim() == 2]
            for each in (model, other)
        ]
        optimizer = kind(parameters[0], lr=0.01 * (1 + hvd.rank()))
        root = kind(parameters[1], lr=0.01)
        train(model, optimizer, 1 + hvd.rank(), hvd.rank())
        train(other, root, 1, 0)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        found, expected = optimizer.state_dict(), root.state_dict()
        assert equal(found, expected), (name, found, expected)
        train(model, optimizer, 2, 7)
        train(other, root, 2, 7)
        assert equal(dict(model.state_dict()), dict(other.state_dict())), name


@check
def state_of_a_distributed_optimizer_is_broadcast():
    model, other = new_model(3), new_model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    root = torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    train(model, optimizer, 2, 1)
    train(other, root, 2, 1)
    optimizer.param_groups[0]["lr"] += hvd.rank()
    for state in optimizer.state.values():
        state["momentum_buffer"] *= 1 + hvd.rank()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.3
    for one, expected in zip(optimizer.state.values(), root.state.values(), strict=True):
        torch.testing.assert_close(one["momentum_buffer"], expected["momentum_buffer"])


@check
def options_arrive_exactly():
    rates = [0.1 + 1e-17, 1 / 3, 3e-310]
    groups = [{"params": [torch.ones(1, requires_grad=True)], "lr": rate} for rate in rates]
    if hvd.rank():
        groups = [{**group, "lr": 0.5, "weight_decay": 0.1} for group in groups]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, 0.95 - 0.1 * hvd.rank()), amsgrad=not hvd.rank()
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)
    assert all(group["amsgrad"] is True for group in optimizer.param_groups)


@check
def learning_rate_may_be_a_tensor():
    rate = torch.tensor(0.25 if hvd.rank() == 0 else 0.75)
    optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=rate)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25))


@check
def new_optimizer_does_not_step():
    model = new_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert equal(dict(model.state_dict()), dict(new_model(0).state_dict()))
    assert all(one.grad is None for one in model.parameters())


@check
def state_that_only_root_has_is_broadcast():
    model = new_model(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        train(model, optimizer, 3, 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(optimizer.state) == 4
    assert all(state["step"] == 3 for state in optimizer.state.values())


@check
def order_of_a_tensor_in_memory_may_differ():
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3)
    expected = copy.deepcopy(layer)
    if hvd.rank() == 0:
        layer = layer.to(memory_format=torch.channels_last)
    else:
        nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    of_one = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    torch.testing.assert_close(layer.weight, expected.weight)
    images = torch.randn(2, 2, 5, 5)
    for one, each in ((layer, optimizer), (expected, of_one)):
        if one is expected or hvd.rank() == 0:
            one(images).square().sum().backward()
            each.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found, state = optimizer.state[layer.weight], of_one.state[expected.weight]
    torch.testing.assert_close(found["momentum_buffer"], state["momentum_buffer"])


@check
def lbfgs_is_refused():
    optimizer = torch.optim.LBFGS(new_model(0).parameters())
    with pytest.raises(ValueError, match=r"cannot broadcast torch.optim.LBFGS state. HINT"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


Point = collections.namedtuple("Point", "x y")


class Thing:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Thing and self.value == other.value

    __hash__ = None


def objects():
    return [
        None,
        0,
        -(10**30),
        1.5,
        True,
        "text \u00e9\u4e16",
        b"\x00bytes",
        b"",
        complex(1, 2),
        (),
        [],
        {},
        {"a": [1, (2, {"b": None})], 3: {4, 5}, None: "none", (1, 2): "pair"},
        torch.arange(6.0).view(2, 3),
        {"weights": torch.ones(2, dtype=torch.bfloat16), "n": np.arange(4, dtype=np.int16)},
        np.array([[1.5, 2.5]]),
        collections.OrderedDict(b=1, a=2),
        Point(1, [2]),
        Thing([1, 2]),
        math.inf,
        torch.float16,
        [None] * 1000,
    ]


@check
def objects_are_broadcast():
    for number, value in enumerate(objects()):
        mine = value if hvd.rank() == last() else ("another", number)
        found = hvd.broadcast_object(mine, root_rank=last())
        assert equal(found, value), (value, found)


@check
def objects_are_gathered():
    for value in objects():
        found = hvd.allgather_object((hvd.rank(), value))
        assert len(found) == hvd.size()
        assert all(equal(one, (rank, value)) for rank, one in enumerate(found)), value


@check
def objects_of_different_sizes_are_gathered():
    found = hvd.allgather_object("x" * (hvd.rank() * 1000), name="sizes")
    assert found == ["x" * (rank * 1000) for rank in range(hvd.size())]


@check
def functions_are_broadcast_where_cloudpickle_is_installed():
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return
    offset = 3
    found = hvd.broadcast_object(lambda x: x + offset)
    assert found(4) == 7


class Stubborn:
    def __reduce__(self):
        raise TypeError("stubborn")


@check
def objects_that_cannot_be_pickled_are_refused_on_all_ranks():
    if hvd.size() == 1:
        return
    with pytest.raises(ValueError, match=r"an object of type Stubborn can't be pickled .*stubborn"):
        hvd.broadcast_object(Stubborn() if hvd.rank() == 0 else None)
    with pytest.raises(
        ValueError, match=r"mine .rank 0.: an object of type Stubborn can't be pickled"
    ):
        hvd.allgather_object(Stubborn() if hvd.rank() == 0 else 1, name="mine")
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@check
def objects_in_a_process_set():
    members = list(range(0, hvd.size(), 2))
    process_set = process_set_of(members)
    if hvd.rank() in members:
        assert hvd.allgather_object(hvd.rank(), process_set=process_set) == members
        found = hvd.broadcast_object(hvd.rank(), members[-1], process_set=process_set)
        assert found == members[-1]
        tensor = torch.tensor([float(hvd.rank())])
        hvd.broadcast_parameters([tensor], members[-1], process_set=process_set)
        assert tensor.item() == members[-1]


def normalized(norm, values, grads):
    """Return the output and the gradients of the inputs."""
    inputs = values.clone().requires_grad_()
    output = norm(inputs)
    output.backward(grads)
    return output.detach(), inputs.grad


def compare_norms(shapes, kind=nn.BatchNorm1d, dtype=torch.float64, steps=3, scale=1.0, **options):
    """Compare SyncBatchNorm on all ranks with one process; ``shapes`` of each rank's inputs."""
    channels = shapes[0][1]
    alone, norm = (
        kind(channels, **options).to(dtype),
        hvd.SyncBatchNorm(channels, **options).to(dtype),
    )
    if alone.affine:
        with torch.no_grad():
            alone.weight.copy_(torch.linspace(0.5, 2, channels))
            alone.bias.copy_(torch.linspace(-1, 1, channels))
    norm.load_state_dict(alone.state_dict())
    counts = [shape[0] for shape in shapes]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        whole = (sum(counts), *shapes[0][1:])
        values = (
            torch.randn(whole, generator=generator, dtype=torch.float64).to(dtype) * scale + step
        )
        grads = torch.randn(whole, generator=generator, dtype=torch.float64).to(dtype)
        expected = normalized(alone, values, grads)
        found = normalized(norm, values.split(counts)[hvd.rank()], grads.split(counts)[hvd.rank()])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.split(counts)[hvd.rank()])
    for (name, one), other in zip(norm.named_parameters(), alone.parameters(), strict=True):
        of_all = hvd.allreduce(one.grad, op=hvd.Sum, name=f"norm.{name}")
        torch.testing.assert_close(of_all, other.grad)
    for one, other in zip(norm.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    return norm


def even(*shape):
    return [(4, *shape)] * hvd.size()


@check
def norm_of_vectors():
    compare_norms(even(5))


@check
def norm_of_images():
    compare_norms(even(3, 4, 5), nn.BatchNorm2d)


@check
def norm_of_volumes():
    compare_norms(even(2, 3, 2, 4), nn.BatchNorm3d)


@check
def norm_in_float32():
    compare_norms(even(3, 4, 5), nn.BatchNorm2d, dtype=torch.float32)


@check
def norm_with_different_numbers_of_samples():
    compare_norms([(2 + 3 * rank, 5) for rank in range(hvd.size())])


@check
def norm_without_samples_on_a_rank():
    if hvd.size() > 1:
        compare_norms([(0 if rank == last() else 3, 5) for rank in range(hvd.size())])


@check
def norm_with_one_sample_on_each_rank():
    if hvd.size() > 1:
        compare_norms([(1, 5)] * hvd.size())


@check
def norm_with_cumulative_average():
    compare_norms(even(5), momentum=None)


@check
def norm_without_parameters():
    compare_norms(even(5), affine=False)


@check
def norm_without_running_statistics():
    norm = compare_norms(even(5), track_running_stats=False)
    norm.eval()
    whole = torch.randn(4 * hvd.size(), 5, generator=torch.Generator().manual_seed(3)).double()
    found = norm(whole.split(4)[hvd.rank()])
    alone = nn.BatchNorm1d(5, track_running_stats=False).double()
    alone.load_state_dict(norm.state_dict())
    torch.testing.assert_close(found, alone(whole).split(4)[hvd.rank()])


@check
def norm_of_large_values():
    compare_norms(even(3), steps=1, scale=1e6)
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(hvd.rank())) + 1e4
    found = hvd.SyncBatchNorm(3)(values)
    every = hvd.allgather(values, name="large").double()
    expected = nn.BatchNorm1d(3).double()(every)
    torch.testing.assert_close(
        hvd.allgather(found.detach(), name="found").double(),
        expected.detach(),
        rtol=0.01,
        atol=0.01,
    )


@check
def norm_of_bfloat16():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4 * hvd.size(), 3, generator=generator).bfloat16()
    found = hvd.SyncBatchNorm(3)(whole.split(4)[hvd.rank()])
    assert found.dtype == torch.bfloat16
    expected = nn.BatchNorm1d(3)(whole.float())
    torch.testing.assert_close(found.float(), expected.split(4)[hvd.rank()], rtol=0.02, atol=0.02)


@check
def norm_in_evaluation_exchanges_nothing():
    norm = compare_norms(even(5)).eval()
    if hvd.rank() == 0:
        norm(torch.ones(2, 5, dtype=torch.float64))
    assert hvd.allreduce(torch.ones(1), name="after").item() == 1.0


@check
def norm_in_a_training():
    def model(norm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 1)).double()

    alone, mine = model(nn.BatchNorm1d), model(hvd.SyncBatchNorm)
    mine = copy.deepcopy(mine)
    one = torch.optim.Adam(alone.parameters(), lr=0.01)
    every = hvd.DistributedOptimizer(
        torch.optim.Adam(mine.parameters(), lr=0.01), mine.named_parameters()
    )
    for step in range(4):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).double()
        for each, optimizer, values in (
            (alone, one, inputs), (mine, every, inputs[hvd.rank() :: hvd.size()]),
        ):  # fmt: skip
            optimizer.zero_grad()
            (each(values) - values.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for found, expected in zip(
        mine.state_dict().values(), alone.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(found, expected)


@check
def norm_of_a_single_value_is_refused():
    rows = 1 if hvd.rank() == 0 else 0
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        hvd.SyncBatchNorm(3)(torch.ones(rows, 3) if hvd.size() > 1 else torch.ones(1, 3))


@check
def norm_of_wrong_shapes_is_refused():
    with pytest.raises(ValueError, match=r"expected at least 2D input .got 1D input."):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"3 channels in dimension 1; this input has shape \(2, 4\)"
    ):
        hvd.SyncBatchNorm(3)(torch.ones(2, 4))


if __name__ == "__main__":
    main()
