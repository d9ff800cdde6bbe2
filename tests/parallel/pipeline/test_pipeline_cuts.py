"""Where a model is cut, what crosses the borders, and models that can't be cut there."""

import copy
from types import SimpleNamespace

import pipelined_models
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from paceline.parallel.pipeline.atoms import Atoms, tensors_by_name
from paceline.parallel.pipeline.divide_model import keep_tensors
from paceline.parallel.pipeline.execution.micro_batches import samples_of, sizes_of, split
from paceline.parallel.pipeline.partition import (
    MEASURED_STEPS,
    SKIPPED_STEPS,
    StageTimes,
    divide,
    units_of_modules,
    units_of_trace,
)
from paceline.parallel.pipeline.stage_plan import plan_forward
from paceline.parallel.pipeline.trace import Skeleton
from paceline.parallel.strategy.model_state import WholeModel
from paceline.world.restoring import load_part

CPU = torch.device("cpu")


def plan(model, inputs, stages, example=True, begins=None):
    """Return the partition of a model, and its plan for these inputs."""
    skeleton = Skeleton(model, Atoms.of(model), CPU)
    units = (
        units_of_trace(skeleton.trace(model, inputs), model)
        if example
        else units_of_modules(model, skeleton.atoms)
    )
    partition = divide(units, stages, list(tensors_by_name(model)), begins)
    return partition, plan_forward(skeleton.trace(model, inputs), partition.held, stages, example)


def test_equal_blocks_are_divided_evenly():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(24)))
    for example in (True, False):
        partition, found = plan(model, torch.ones(2, 9), 4, example)
        assert partition.shares == [0.25] * 4
        assert [len(stage.events) for stage in found.stages] == [6] * 4
        assert str(partition).startswith("stage 0: 0")


def test_stages_begin_with_named_modules():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    partition, _ = plan(model, torch.ones(2, 4), 3, begins=["1", "5"])
    assert [len(units) for units in partition.units] == [1, 4, 1]
    with pytest.raises(ValueError, match=r"balance=\['7', '5'\]: no stage can begin with '7'"):
        plan(model, torch.ones(2, 4), 3, begins=["7", "5"])
    with pytest.raises(ValueError, match="has 1 name, and 3 stages begin"):
        plan(model, torch.ones(2, 4), 3, begins=["5"])


def test_times_of_the_stages_name_the_slowest_and_a_better_balance():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    partition, _ = plan(model, torch.ones(2, 4), 2)
    said, noted = [], []
    times = StageTimes(partition, "1f1b", said.append, lambda **fields: noted.append(fields))
    for step in range(SKIPPED_STEPS + MEASURED_STEPS + 1):
        factor = 1_000_000 * (100 if step < SKIPPED_STEPS else 1)
        times.add([30 * factor, 10 * factor], [40 * factor, 39 * factor], 4)
    assert said == [
        "pipeline: stages were idle for 50% of 20 steps, 20% by the formula; computing took 30, 10 "
        "ms by stage. The others wait for stage 0. HINT: balance=['1']"
    ]
    known = {"schedule": "1f1b", "stages": 2, "micro_batches": 4}
    assert noted == [{"pipeline": known}, {"pipeline": known | {"balance": ["1"]}}]
    # on a GPU, the times are those of launches
    said.clear()
    noted.clear()
    times = StageTimes(
        *(partition, "1f1b", said.append, lambda **fields: noted.append(fields)), is_timed=False
    )
    for _ in range(SKIPPED_STEPS + MEASURED_STEPS + 1):
        times.add([30, 10], [40, 39], 4)
    assert said == []
    assert noted == [{"pipeline": known}]


def test_skips_are_relayed_and_inputs_are_not():
    model, x, _, _ = pipelined_models.CASES["unet"](2)
    _, found = plan(model, x, 4)
    assert max(len(wires) for wires in found.wires) > 1
    for before, after in zip(found.wires, found.wires[1:], strict=False):
        relayed = {w.value for w in before} & {w.value for w in after}
        assert relayed or len(after) == 1
    model = pipelined_models.Transformer(tied=False)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    _, found = plan(model, (torch.ones(2, 5, dtype=torch.int64), mask), 3)
    assert [len(wires) for wires in found.wires] == [1, 1]  # and not the mask


def test_without_an_example_a_wrong_order_is_refused_with_the_line():
    model, x, _, _ = pipelined_models.CASES["unet"](2)
    with pytest.raises(
        ValueError,
        match=r"layer\(torch.cat.*uses up.0.weight of stage 0 after.*HINT: .*example_inputs",
    ):
        plan(model, x, 2, example=False)


def test_too_many_stages_are_refused():
    with pytest.raises(ValueError, match="can be cut in 1 place, and 4 stages need 3"):
        plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2), 4)
    with pytest.raises(ValueError, match="the model can't be cut: it is one part"):
        plan(nn.Linear(2, 2), torch.ones(1, 2), 2)


class Model(nn.Module):
    """Two layers with a function between."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.between = nn.Linear(3, 3), nn.Linear(3, 3), between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def depends_on_data(x):
    return x * 2 if x.sum() > 0 else x


def reads_a_value(x):
    return x * x.mean().item()


MADE_ELSEWHERE = torch.ones(3)


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (depends_on_data, r"reads the value of a tensor.*if x.sum\(\) > 0"),
        (reads_a_value, r"reads the value of a tensor.*x.mean\(\).item\(\)"),
        (lambda x: x + MADE_ELSEWHERE, "neither an input nor a parameter.*MADE_ELSEWHERE"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "can't be traced without data"),
        (lambda x: x[x > 0], "reads the value of a tensor"),
    ],
)
def test_forwards_that_depend_on_data_are_refused_with_the_line(between, text):
    with pytest.raises(ValueError, match=text) as failed:
        plan(Model(between), torch.ones(2, 3), 2)
    assert "HINT: " in str(failed.value)


def test_control_flow_of_shapes_and_modes_is_followed():
    def between(x):
        return F.relu(x) if len(x) > 1 else x.exp().sin()

    model = Model(between)
    skeleton = Skeleton(model, Atoms.of(model), CPU)
    lengths = [len(skeleton.trace(model, torch.ones(n, 3)).events) for n in (2, 1)]
    assert lengths == [3, 4]


class Stateful(nn.Module):
    """Two layers; ``change`` is called with the model and the values between them."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change, self.scale = nn.Linear(3, 3), nn.Linear(3, 3), change, 1.0
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.a(x)
        self.change(self, x)
        return self.b(x * self.scale)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model, x: setattr(model, "scale", model.scale + 1), r"changes self\.scale"),
        (lambda model, x: setattr(model, "mean", x.mean(0)), r"assigns self\.mean"),
    ],
)
def test_changes_of_the_model_that_would_be_lost_are_refused(change, text):
    with pytest.raises(ValueError, match=f"the forward of the Stateful {text}. HINT: "):
        plan(Stateful(change), torch.ones(2, 3), 2)


def test_caches_and_attributes_that_the_script_changes_are_followed():
    model = Stateful(lambda model, x: setattr(model, "seen", x))
    skeleton = Skeleton(model, Atoms.of(model), CPU)
    before = skeleton.modes(model)
    assert skeleton.trace(model, torch.ones(2, 3)).events[1].leaves[1] == 1.0
    model.scale = 0.5
    assert skeleton.modes(model) != before
    assert skeleton.trace(model, torch.ones(2, 3)).events[1].leaves[1] == 0.5


def test_inputs_that_are_neither_tensors_nor_simple_are_refused():
    with pytest.raises(ValueError, match=r"the inputs contain a ndarray\. HINT: tensors"):
        plan(Model(torch.relu), (torch.ones(2, 3).numpy(),), 2)


def test_random_control_flow_is_refused():
    import random

    with pytest.raises(ValueError, match="draws from Python's random"):
        plan(Model(lambda x: x * random.random()), torch.ones(2, 3), 2)


class SharedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_shared_module_with_statistics_on_two_stages_is_refused():
    with pytest.raises(
        ValueError, match=r"forward changes norm\.num_batches_tracked, which stages 0 and 1"
    ):
        plan(SharedNorm(), torch.ones(2, 3), 2, begins=["b"])


class SharedMemory(nn.Module):
    """The second layer changes a view of what the third one uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.a(x)
        left = x[:, :2]
        y = self.b(x)
        left.mul_(2)
        return self.c(x + y)


def test_a_change_of_memory_that_two_values_share_is_refused():
    with pytest.raises(ValueError, match=r"left.mul_\(2\).*changes a tensor in place"):
        plan(SharedMemory(), torch.ones(2, 4), 2, example=False, begins=["b"])


def test_sizes_of_micro_batches():
    assert sizes_of(7, 4) == [2, 2, 2, 1]
    assert sizes_of(3, 4) == [1, 1, 1]
    assert samples_of({"x": torch.ones(7, 2), "scale": torch.tensor(2.0)}, torch.ones(7)) == 7
    parts = split({"x": torch.arange(7), "flag": True}, [2, 2, 2, 1])
    assert [one["x"].tolist() for one in parts] == [[0, 1], [2, 3], [4, 5], [6]]
    with pytest.raises(ValueError, match="have 7 and 5 there"):
        samples_of(torch.ones(7, 2), torch.ones(5))
    assert split((), [1, 2]) == [(), ()]


def test_a_stage_without_a_batch_normalization_is_restored():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state, whole = model.state_dict(), WholeModel.of(model)
    stage = copy.deepcopy(model)
    keep_tensors(stage, {"0.weight", "0.bias"})
    owned = SimpleNamespace(
        whole_of=lambda part: whole,
        local=lambda part, state: {name: state[name] for name in part.state_dict()},
    )
    load_part(stage, {name: value + 1 for name, value in state.items()}, "model", owned)
    assert stage[0].bias.equal(model[0].bias + 1)
