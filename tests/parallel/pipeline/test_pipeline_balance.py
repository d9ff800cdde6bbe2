"""Stages divided by measured times and memory, and optimizer states in parts on replicas."""

import copy
import itertools
import random
import time

import pytest
import thread_ranks
import torch
from torch import nn

from paceline.parallel.pipeline.atoms import Atoms, tensors_by_name
from paceline.parallel.pipeline.divide_model import (
    MAX_SAMPLES,
    StageMemory,
    _few_samples,
    held_micro_batches,
    measure_units,
)
from paceline.parallel.pipeline.execution.sharded_parameters import owners_of
from paceline.parallel.pipeline.partition import (
    DoesNotFitError,
    Unit,
    divide,
    divide_at,
    units_of_trace,
)
from paceline.parallel.pipeline.trace import Skeleton

X, Y = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)


class Slow(nn.Linear):
    """A layer that takes longer than its operations say."""

    def __init__(self, seconds):
        super().__init__(6, 6)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def slow_first():
    return nn.Sequential(Slow(0.03), *(Slow(0.004) for _ in range(5)))


def distribute(world, said, **options):
    torch.manual_seed(1)
    model = slow_first()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world._progress.say_once = said.append
    called, _ = world.distribute(
        model, optimizer, layout="pp2 + micro-batches=2", example_inputs=X[:4], **options
    )
    return sorted({name.split(".")[0] for name in called.state_dict()})


def test_stages_are_divided_by_measured_times():
    said = [[], []]
    first, second = thread_ranks.run(lambda world: distribute(world, said[world.rank]))
    assert (first, second) == (["0"], ["1", "2", "3", "4", "5"])
    assert "of the measured time" in said[0][0]
    assert any("need about" in line and "MiB of memory" in line for line in said[0])


@pytest.mark.parametrize("balance", ["operations", ["3"]])
def test_a_given_balance_is_not_measured(balance):
    said = [[], []]
    found = thread_ranks.run(lambda world: distribute(world, said[world.rank], balance=balance))
    assert found == [["0", "1", "2"], ["3", "4", "5"]]
    assert "of the operations" in said[0][0]


def measured(model, inputs):
    skeleton = Skeleton(model, Atoms.of(model), torch.device("cpu"))
    trace = skeleton.trace(model, inputs)
    return measure_units(model, skeleton, trace, units_of_trace(trace, model), inputs)


def test_a_measurement_changes_neither_model_nor_hooks_nor_random_numbers():
    calls = []
    model = nn.Sequential(
        Slow(0.03), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    model[3].register_forward_hook(lambda *_: calls.append(1))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    units = measured(model, torch.full((4, 6), float("nan")))
    assert units[0].cost >= 0.03
    assert calls == [1]  # by the trace, as in each new shape
    assert torch.get_rng_state().equal(state)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert value.equal(before[name]), name
    linear = next(unit for unit in units if unit.name == "3")
    # its input, and the output that ReLU keeps; not its weights
    assert linear.activations == 2 * 4 * 6 * 4


def test_what_can_not_be_measured_is_divided_by_operations():
    quick = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    assert measured(quick, X) is None  # too short to be measured
    replaced = nn.Sequential(Slow(0.03), nn.Linear(6, 2))
    replaced[0].forward = replaced[0].forward  # such as a block that recomputes
    assert measured(replaced, X) is None


def test_memory_moves_the_cut_and_a_model_without_memory_is_refused():
    names = [str(i) for i in range(4)]
    units = [Unit(n, (n,), 1.0, activations=100.0) for n in names]
    tensors = {n: torch.zeros(1) for n in names}
    memory = StageMemory(tensors, held_micro_batches("1f1b", 2, 8), None)
    plain = divide(units, 2, names)
    assert plain.cuts == [2]
    assert memory.of_stages(plain) == [2 * (2 * 100 + 4), 2 * (100 + 4)]
    tight = divide(units, 2, names, None, lambda s, of: memory.of(s, of) <= 400)
    assert tight.cuts == [1]
    with pytest.raises(DoesNotFitError, match="no division into 2 stages fits"):
        divide(units, 2, names, None, lambda s, of: memory.of(s, of) <= 200)


def test_a_division_of_many_units_that_fits_is_the_best_of_all_and_asks_few_times():
    draw, asked = random.Random(3), []

    def fits(stage, of):
        asked.append(stage)
        return sum(unit.activations for unit in of) * (3 - stage) <= 60

    for _ in range(20):
        units = [
            Unit(str(i), (str(i),), draw.random(), activations=draw.randint(1, 9))
            for i in range(10)
        ]
        every = [
            cuts
            for cuts in itertools.combinations(range(1, 10), 2)
            if all(map(fits, range(3), divide_at(units, cuts, []).units))
        ]
        if not every:
            with pytest.raises(DoesNotFitError):
                divide(units, 3, [], None, fits)
            continue
        least = min(max(divide_at(units, cuts, []).shares) for cuts in every)
        assert max(divide(units, 3, [], None, fits).shares) == pytest.approx(least)
    asked.clear()
    divide([Unit(str(i), (), 1.0) for i in range(100)], 3, [], None, fits)
    assert len(asked) < 1000


def test_memory_of_a_stage_counts_gradients_and_states():
    model = nn.Linear(4, 4, bias=False)
    tensors = tensors_by_name(model)
    unit = Unit("0", ("weight",), 1.0)
    for optimizer, copies in (
        (None, 2),
        (torch.optim.SGD(model.parameters(), lr=1), 2),
        (torch.optim.SGD(model.parameters(), lr=1, momentum=0.9), 3),
        (torch.optim.Adam(model.parameters()), 4),
    ):
        memory = StageMemory(tensors, [1], optimizer)
        assert memory.of(0, [unit]) == copies * 64
    # Adam's two states in halves on two replicas
    assert StageMemory(tensors, [1], optimizer, shards=2).of(0, [unit]) == 3 * 64
    # and shards of the parameters, beside the whole ones
    sharded = StageMemory(tensors, [1], optimizer, shards=2, has_shards=True)
    assert sharded.of(0, [unit]) == 3.5 * 64
    # the last stage keeps the outputs of a batch, and puts them together
    for activations, needed in ((1000.0, 1100), (10.0, 300)):
        memory = StageMemory({}, [1, 1], None, outputs=100.0)
        units = [Unit("0", (), 1.0, activations=activations)]
        assert [memory.of(stage, units) for stage in range(2)] == [activations, needed]
    assert held_micro_batches("gpipe", 3, 5) == [5, 5, 5]
    assert held_micro_batches("zero-bubble", 3, 2) == [2, 2, 1]


def test_states_are_divided_evenly_over_replicas():
    sizes = {"a": 8, "b": 4, "c": 3, "tied": 6, "d": 1}
    stages = {"a": [0], "b": [0], "c": [1], "tied": [0, 1], "d": [1]}
    assert owners_of(sizes, stages, 2) == {"a": 0, "tied": 1, "b": 1, "c": 0, "d": 0}


def test_replicas_of_a_stage_hold_parts_of_the_states_and_train_as_one_process():
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    loss = nn.functional.mse_loss

    def build():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    one = build()
    alone = torch.optim.Adam(one.parameters(), lr=0.01)
    for _ in range(3):
        loss(one(inputs), inputs).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        alone.step()
        alone.zero_grad()

    def train(world):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = world.distribute(
            model, optimizer, layout="pp2 x zero1 + micro-batches=2"
        )
        own = inputs[4 * world.mesh.data_rank :][:4]
        for _ in range(3):
            world.forward_backward(model, own, own, loss=loss)
            world.step(optimizer, clip=0.5)
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(parameter, one.get_parameter(name), rtol=1e-4, atol=1e-6)
        (group,) = optimizer.param_groups
        assert len(group["params"]) == 4  # all of its stage between steps
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    held = thread_ranks.run(train, 4)
    assert sum(held) == sum(p.numel() for p in one.parameters())
    assert max(held) == min(held)


@pytest.mark.parametrize("layout", ["pp2 x zero1/host", "pp2 x zero3/2"])
def test_shards_on_a_part_of_the_replicas_are_refused(layout):
    def distribute(world):
        world.distribute(slow_first(), layout=layout)

    for error in thread_ranks.run(distribute, 4, outcomes=True):
        assert "is not implemented yet. HINT: zero" in str(error)


def test_large_example_inputs_are_measured_in_part():
    inputs, scale = _few_samples({"x": torch.zeros(256, 3), "scale": 0.5})
    assert inputs["x"].shape == (MAX_SAMPLES, 3)
    assert inputs["scale"] == 0.5
    assert scale == 256 / MAX_SAMPLES
    other = (torch.zeros(256, 3), torch.zeros(3))
    assert _few_samples(other) == (other, 1.0)
