"""Prediction for a model of the user: copies without data, and the choice of a layout."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.cost.layout import Layout
from paceline.cost.layout_memory import LAYOUTS
from paceline.parallel.fake_tensors import OneFakeMode
from paceline.parallel.memory.choose import (
    choose_for_all_ranks,
    held_bytes,
    predict_setup,
    trace_model,
)
from paceline.parallel.memory.setup import ForwardInputs, ModelSetup, copy_without_data
from paceline.parallel.memory.trace import TrainingStep
from paceline.parallel.memory_budget import GIB, available_bytes, budget_bytes

sys.path.append(str(Path(paceline.__file__).parents[2] / "benchmarks/scripts/layouts"))
from allocator_peak import measure_peak

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, width=64, blocks=4):
        super().__init__()
        self.table = nn.Embedding(100, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.last = nn.Linear(width, 100, bias=False)
        self.last.weight = self.table.weight

    def forward(self, numbers):
        return self.last(self.encoder(self.table(numbers)))


def setup(optimizer=torch.optim.AdamW, **options):
    model = Net()
    return ModelSetup(model, optimizer(model.parameters()), CPU, **options)


INPUTS = ForwardInputs((torch.zeros(8, 32, dtype=torch.int64),))


def test_copies_have_no_data_and_the_original_stays_unchanged():
    original = setup()
    state = torch.get_rng_state()
    with OneFakeMode():
        (model,), (optimizer,) = copy_without_data([original.model], [original.optimizer], CPU)
    assert model.last.weight is model.table.weight
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    trace_model(original, INPUTS, "blocks")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in original.model.parameters())
    assert not original.optimizer.state
    assert "forward" not in vars(original.model.encoder.layers[0])  # not recomputed


@pytest.mark.long
def test_prediction_is_within_5_percent_of_the_measured_peak():
    def build():
        made = setup()
        (numbers,) = INPUTS.args

        def run():
            made.model(numbers).sum().backward()
            made.optimizer.step()
            made.optimizer.zero_grad()

        return TrainingStep([made.model], [made.optimizer], [numbers], run)

    (predicted,) = predict_setup(setup(), INPUTS, 1)[:1]
    assert predicted.memory.total == pytest.approx(measure_peak(build), rel=0.05)


@pytest.mark.long
def test_recomputation_keeps_fewer_activations():
    found = {one.name: one for one in predict_setup(setup(), INPUTS, 4)}
    assert list(found) == [*map(str, LAYOUTS), *(f"{layout} + recompute" for layout in LAYOUTS)]
    kept, recomputed = found["data"].memory, found["data + recompute"].memory
    assert recomputed.activations + recomputed.temporary < 0.6 * (kept.activations + kept.temporary)
    assert found["zero3"].memory.total <= found["zero2"].memory.total < kept.total
    already = setup(recomputes=True)
    assert [one.name for one in predict_setup(already, INPUTS, 4)] == list(map(str, LAYOUTS))


@pytest.mark.long
def test_model_on_the_device_meta():
    with torch.device("meta"):
        made = setup()
    assert trace_model(made, INPUTS).gradient_bytes == trace_model(setup(), INPUTS).gradient_bytes


@pytest.mark.long
def test_autocast_keeps_activations_in_16_bits():
    plain, autocast = setup(), setup(autocast_dtype=torch.bfloat16)
    of = [predict_setup(one, INPUTS, 1)[0].memory.total for one in (plain, autocast)]
    assert of[1] < of[0]


def test_inputs():
    x = torch.zeros(2)
    assert ForwardInputs.parse(None) is None
    assert ForwardInputs.parse(x).args == (x,)
    assert ForwardInputs.parse([x, 3]).args == (x, 3)
    assert ForwardInputs.parse({"mask": x}).options == {"mask": x}


def test_held_bytes_follow_the_rule_without_temporary_tensors():
    made = ModelSetup(model := nn.Linear(1000, 1000), torch.optim.Adam(model.parameters()), CPU)
    count = sum(p.numel() for p in model.parameters())
    # weights, gradients and two states; one rank has no buckets
    expected = 16 * count  # of parameters, gradients and two states
    assert held_bytes(made, Layout(), 1) == pytest.approx(expected, rel=0.01)


def test_model_that_reads_values():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) * x.sum().item()

    reads = ModelSetup(Reads(), None, CPU)
    with pytest.raises(ValueError, match=r"reads values of a tensor .*HINT"):
        trace_model(reads, ForwardInputs((torch.ones(2, 3),)))


def test_inputs_of_another_shape_are_named():
    made = ModelSetup(nn.Linear(3, 3), None, CPU)
    with pytest.raises(ValueError, match=r"the memory of the Linear can't be traced .*HINT"):
        trace_model(made, ForwardInputs((torch.ones(2, 4),)))


@pytest.mark.long
def test_all_ranks_take_the_layout_that_fits_the_rank_with_least_room():
    small = predict_setup(setup(), ForwardInputs((torch.zeros(1, 4, dtype=torch.int64),)), 2)
    large = predict_setup(setup(), INPUTS, 2)
    least = min(one.memory.total for one in large)

    def gather(mine, _):
        return [mine, (least, large)]

    choice = choose_for_all_ranks(lambda: small, 100 * GIB, gather)
    assert choice.predicted.memory.total == least
    with pytest.raises(ValueError, match="of the other rank"):
        choose_for_all_ranks(lambda: small, GIB, lambda mine, _: [mine, "of the other rank"])


def test_budget():
    assert budget_bytes(0.5, CPU) == GIB // 2
    assert 0 < available_bytes(CPU, 2) <= budget_bytes(None, CPU)
    with pytest.raises(ValueError, match=r"memory_budget must be above 0 GiB; this is 0. HINT"):
        budget_bytes(0, CPU)
