"""Predicted memory of a rank in each layout, from the memory of one process's step."""

import pytest

from paceline.cost.layout_memory import (
    LAYOUTS,
    MemoryByCategory,
    MemorySample,
    StepMemory,
    bytes_per_parameter,
    choose_layout,
    predict_layout,
)

N = 1_000_000  # parameters in 32 bits
STATES = {"parameters": 4 * N, "gradients": 4 * N, "optimizer_states": 8 * N}


def step(activations=0):
    samples = [
        MemorySample(
            "Net.layer",
            "forward",
            MemoryByCategory(parameters=4 * N, optimizer_states=8 * N, activations=activations),
        ),
        MemorySample("", "optimizer", MemoryByCategory(**STATES)),
    ]
    return StepMemory(samples, {f"layer.{i}": N // 2 for i in range(8)}, 4 * N)


@pytest.mark.parametrize("layout", ["data", "zero1"])
def test_states_follow_the_rule(layout):
    predicted = predict_layout(step(), layout, 4)
    assert predicted.memory.total == bytes_per_parameter(layout, 4) * N


def test_rule_of_each_layout():
    assert [bytes_per_parameter(layout, 4) for layout in LAYOUTS] == [16, 10, 7, 4]
    mixed = [bytes_per_parameter(layout, 4, master_copy=True) for layout in LAYOUTS]
    assert mixed == [16, 7, 5.5, 4]


def test_peak_names_phase_and_module():
    assert predict_layout(step(), "data", 1).phase == "optimizer"
    predicted = predict_layout(step(activations=50 * N), "data", 4)
    assert (predicted.phase, predicted.module) == ("forward", "Net.layer")


def test_zero3_holds_the_parts_and_two_unsharded_blocks():
    memory = predict_layout(step(activations=50 * N), "zero3", 4).memory
    assert memory.unsharded == N
    assert memory.parameters == N
    assert memory.optimizer_states == 2 * N
    assert memory.activations == 50 * N


def test_layout_with_least_communication_that_fits():
    assert choose_layout(step(), 4, 16 * N).predicted.layout == "data"
    choice = choose_layout(step(), 4, 12 * N)
    assert choice.predicted.layout == "zero1"
    assert choice.reason == "zero1 needs 9.5 MiB of 11.4 MiB; data needs 15.3 MiB"


def test_no_layout_fits():
    with pytest.raises(ValueError, match=r"no layout fits 0.1 MiB on 4 ranks: zero3 needs .*HINT"):
        choose_layout(step(), 4, 100_000)


def test_bad_input():
    with pytest.raises(ValueError, match=r"layout='zero4' is unknown. HINT"):
        predict_layout(step(), "zero4", 4)
    with pytest.raises(ValueError, match=r"ranks=0 is below 1. HINT"):
        predict_layout(step(), "data", 0)
    with pytest.raises(ValueError, match=r"no samples. HINT"):
        predict_layout(StepMemory([], {}, 0), "data", 2)
