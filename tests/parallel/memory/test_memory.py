"""Memory of a step, traced with fake tensors, against PyTorch's CPU allocator."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.cost.layout import Layout
from paceline.cost.layout_memory import predict_layout
from paceline.parallel.memory.trace import TrainingStep, blocks_of, trace_step

sys.path.append(str(Path(paceline.__file__).parents[2] / "benchmarks/scripts/layouts"))
from allocator_peak import measure_peak


def perceptron():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(64, 256)

    def run():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return TrainingStep([model], [optimizer], [x], run)


def test_prediction_is_within_5_percent_of_the_measured_peak():
    predicted = predict_layout(trace_step(perceptron), Layout(), 1).memory
    assert predicted.total == pytest.approx(measure_peak(perceptron), rel=0.05)
    parameters = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert predicted.parameters == predicted.gradients == parameters
    assert predicted.optimizer_states >= 2 * parameters


def test_peak_in_forward_and_backward_names_the_module():
    samples = trace_step(perceptron).samples
    assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= {s.module for s in samples}
    assert {s.phase for s in samples} == {"forward", "backward", "optimizer"}


def test_module_called_twice_in_a_step():
    def build():
        model = nn.Linear(8, 8)
        x = torch.zeros(4, 8)

        def run():
            (model(x) + model(2 * x)).sum().backward()

        return TrainingStep([model], [], [x], run)

    assert trace_step(build).gradient_bytes == 4 * 72


@pytest.mark.parametrize("unfreezes", [False, True])
def test_step_of_a_model_with_frozen_parts(unfreezes):
    def build():
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.zeros(64, 256)

        def run():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            model[0].requires_grad_(unfreezes)

        return TrainingStep([model], [optimizer], [x], run)

    samples = trace_step(build).samples
    trained = 4 * (512 * 8 + 8) + unfreezes * 4 * (256 * 512 + 512)
    assert max(sample.memory.gradients for sample in samples) == trained
    assert samples[-1].memory.parameters == 4 * (256 * 512 + 512 + 512 * 8 + 8)


def test_step_that_reads_values():
    def build():
        x = torch.ones(3)
        return TrainingStep([nn.Linear(3, 3)], [], [x], lambda: print((x * 2).sum().item()))

    with pytest.raises(ValueError, match=r"reads values of a tensor .*HINT: leave .item\(\)"):
        trace_step(build)


def test_blocks_are_those_of_sharded_layouts():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)
    assert list(blocks_of(encoder)) == ["layers.0", "layers.1", "layers.2"]
    named = blocks_of(encoder, ["layers.0.linear1", "layers.0"])
    assert named["layers.0.linear1"] == 4 * (8 * 16 + 16)
    assert sum(named.values()) == 4 * sum(p.numel() for p in encoder.layers[0].parameters())
