"""Pipelines together with other axes, on threads: each equals one process, or is refused."""

import copy
import functools

import pipelined_models
import pytest
import thread_ranks
import torch
from torch.distributed.tensor import DTensor

from paceline.comm.members.exchange_objects import all_gather_objects
from paceline.parallel.strategy.model_state import WholeModel
from paceline.world.layouts.inference import gather_stages

CASES = ("tied", "heads", "chain", "unet")
LONG = pytest.mark.long


def one_process(case):
    """Return losses, parameters and outputs of one process."""
    torch.manual_seed(1)
    model, inputs, targets, loss = pipelined_models.CASES[case](8)
    one = pipelined_models.OneProcess(model)
    found = [one.step(inputs, targets, loss, [2] * 4, clip=0.5) for _ in range(3)]
    with torch.no_grad():
        outputs = called(one.model.eval(), inputs)
    return found, one.model.state_dict(), outputs


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def part(tree, at):
    if isinstance(tree, dict):
        return {k: part(v, at) for k, v in tree.items()}
    return tree[at] if torch.is_tensor(tree) else tree


def train(world, case, layout):
    torch.manual_seed(1)
    model, inputs, targets, loss = pipelined_models.CASES[case](8)
    _, example, _, _ = pipelined_models.CASES[case](2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    model, optimizer = world.distribute(model, optimizer, layout=layout, example_inputs=example)
    n = 8 // world.mesh.data_size
    own = slice(world.mesh.data_rank * n, (world.mesh.data_rank + 1) * n)
    losses = []
    for _ in range(3):
        mean = world.forward_backward(model, part(inputs, own), part(targets, own), loss=loss)
        losses.append(mean.item())
        world.step(optimizer, clip=0.5)
    distributed = next(one for one in world._training.models if one.called is model)
    pieces = {}
    for name, value in distributed.plain.state_dict().items():
        if isinstance(value, DTensor):
            assert value.size(0) == 1 or value.to_local().shape != value.shape
            value = value.full_tensor()
        of = distributed.part_of(name)
        if of is None:
            pieces[name] = [((slice(None),) * value.dim(), value)]
            continue
        slabs = of.slabs((0,) * value.dim(), tuple(value.shape))
        pieces[name] = [
            (tuple(slice(o, o + k) for o, k in zip(first, value[at].shape, strict=True)), value[at])
            for first, at in slabs
        ]
    return losses, pieces, called(model.eval(), inputs), world.mesh.data_rank


def check(case, layout, ranks):
    expected, state, outputs = one_process(case)
    found = thread_ranks.run(functools.partial(train, case=case, layout=layout), ranks)
    replicas = {}
    for losses, pieces, evaluated, data_rank in found:
        torch.testing.assert_close(evaluated, outputs, rtol=2e-4, atol=1e-5)
        replicas.setdefault(data_rank, []).append(losses)
        for name, parts in pieces.items():
            for at, value in parts:
                torch.testing.assert_close(
                    value, state[name][at], rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
    assert "tp" not in layout or any(
        value.shape != state[name].shape
        for _, pieces, _, _ in found
        for name, parts in pieces.items()
        for _, value in parts
    )
    names = {name for _, pieces, _, _ in found for name in pieces}
    assert names == set(state)
    means = [each[0] for _, each in sorted(replicas.items())]
    for each in replicas.values():  # the same on all ranks that share samples
        assert all(one == pytest.approx(each[0]) for one in each)
    assert [sum(of) / len(of) for of in zip(*means, strict=True)] == pytest.approx(
        expected, rel=1e-4
    )


@pytest.mark.parametrize("case", [*CASES, "resnet"])
def test_stages_whose_layers_are_divided_over_the_tensor_axis(case):
    check(case, "pp2 x tp2 + micro-batches=4", 4)


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 x tp2 + micro-batches=4 + schedule=gpipe",
        "pp2 x tp2 + micro-batches=4 + schedule=interleaved",
    ],
)
def test_other_schedules_with_the_tensor_axis(layout):
    check("chain", layout, 4)


@pytest.mark.parametrize(
    "case", ["tied", *(pytest.param(one, marks=LONG) for one in CASES if one != "tied")]
)
def test_parameters_in_shards_on_the_replicas_of_a_stage(case):
    check(case, "pp2 x zero3 + micro-batches=2", 4)


def test_the_whole_model_is_gathered_from_shards():
    def gathered(world):
        torch.manual_seed(1)
        model, _, _, _ = pipelined_models.CASES["tied"](2)
        whole, state = WholeModel.of(model), copy.deepcopy(model.state_dict())
        model = world.distribute(model, layout="pp2 x zero3")
        distributed = next(one for one in world._training.models if one.called is model)
        return gather_stages(distributed, whole, all_gather_objects), state

    first, *others = thread_ranks.run(gathered, 4)
    found, expected = first
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())
    assert all(found == {} for found, _ in others)


@pytest.mark.parametrize(
    "schedule",
    ["zero-bubble", *(pytest.param(one, marks=LONG) for one in ("gpipe", "interleaved"))],
)
def test_other_schedules_with_shards(schedule):
    check("tied", f"pp2 x zero2 + micro-batches=2 + schedule={schedule}", 4)


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 x zero1 x tp2",
        pytest.param("dp2 x pp2 x tp2", marks=LONG),
        pytest.param("pp2 x zero3 x tp2", marks=LONG),
    ],
)
def test_all_three_axes(layout):
    check("transformer", f"{layout} + micro-batches=2", 8)
