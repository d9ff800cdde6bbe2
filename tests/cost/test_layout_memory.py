"""Predicted memory of a rank in each layout, from the memory of one process's step."""

import pytest

from paceline.cost.layout import Layout
from paceline.cost.layout_memory import (
    LAYOUTS,
    MemoryByCategory,
    MemorySample,
    StepMemory,
    choose_layout,
    predict_layout,
    predict_layouts,
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


def test_states_follow_the_rule_of_16_bytes_a_parameter():
    predicted = predict_layout(step(), Layout(), 4)
    assert predicted.memory.total == 16 * N
    # without activations the largest sum is in the optimizer
    assert predict_layout(step(), Layout(zero=3), 1).memory.total == 16 * N


def test_peak_names_phase_and_module():
    assert predict_layout(step(), Layout(), 1).phase == "optimizer"
    predicted = predict_layout(step(activations=50 * N), Layout(), 4)
    assert (predicted.phase, predicted.module) == ("forward", "Net.layer")


def test_zero3_holds_the_parts_and_two_unsharded_blocks():
    memory = predict_layout(step(activations=50 * N), Layout(zero=3), 4).memory
    assert memory.unsharded == N
    assert memory.parameters == N
    assert memory.optimizer_states == 2 * N
    assert memory.activations == 50 * N


def test_zero1_keeps_whole_gradients_within_an_accumulation():
    one, four = (predict_layout(step(), Layout(zero=1), 4, accumulate=n).memory for n in (1, 4))
    assert one == predict_layout(step(), Layout(zero=2), 4).memory
    assert four.gradients == 4 * N


def test_layouts_keep_the_gradients_of_earlier_batches_within_an_accumulation():
    held = {"parameters": 4 * N, "optimizer_states": 8 * N, "activations": 50 * N}
    traced = StepMemory(
        [MemorySample("Net", "backward", MemoryByCategory(**held))], step().blocks, 4 * N
    )
    one, two = (
        [predict_layout(traced, layout, 4, accumulate=n).memory.gradients for layout in LAYOUTS]
        for n in (1, 2)
    )
    assert one == [4 * N, 0, 0, 0]
    assert two == [8 * N, 4 * N, N, N]  # DDP's buckets and the gradients; whole ones; shards
    assert predict_layout(traced, Layout(), 1, accumulate=2).memory.gradients == 4 * N
    in_optimizer = predict_layout(step(), Layout(), 4, accumulate=2)
    assert (in_optimizer.phase, in_optimizer.memory.gradients) == ("forward", 8 * N)


def test_blocks_are_sharded_again_when_backward_has_reduced_them():
    held = {"parameters": 4 * N, "optimizer_states": 8 * N}
    begin = MemorySample("Net", "forward", MemoryByCategory(**held))
    end = MemorySample(
        "Net", "backward", MemoryByCategory(**held, gradients=3 * N, activations=50 * N)
    )
    predicted = predict_layout(StepMemory([begin, end], step().blocks, 4 * N), Layout(zero=2), 4)
    assert predicted.memory.unsharded == N + 2 * N // 2  # two blocks, and gradients of one, twice


def test_fastest_layout_that_fits():
    predicted = predict_layouts(step(), None, 4)
    assert [p.layout for p in predicted] == list(LAYOUTS)
    assert choose_layout(predicted, 16 * N).predicted.layout == Layout()
    choice = choose_layout(predicted, 12 * N)
    assert choice.predicted.layout == Layout(zero=1)
    assert choice.reason == "zero1 needs 6.7 MiB of 11.4 MiB; too large: data 15.3 MiB"


def test_layouts_with_recomputation_come_last():
    predicted = predict_layouts(step(activations=50 * N), step(activations=2 * N), 4)
    assert [p.name for p in predicted[4:]] == [f"{layout} + recompute" for layout in LAYOUTS]
    choice = choose_layout(predicted, 20 * N)
    assert choice.predicted.layout == Layout(recompute="blocks")


def test_one_rank_has_nothing_to_shard():
    assert [p.name for p in predict_layouts(step(), step(), 1)] == ["data", "data + recompute"]


def test_no_layout_fits():
    reason = r"no layout fits 0.1 MiB on 4 ranks: the least is .* with zero3, of it .*HINT"
    with pytest.raises(ValueError, match=reason):
        choose_layout(predict_layouts(step(), None, 4), 100_000)


def test_bad_input():
    with pytest.raises(ValueError, match=r"layout='tp2': .* with tp is not predicted yet. HINT"):
        predict_layout(step(), Layout(tp=2), 4)
    with pytest.raises(ValueError, match=r"ranks=0 is below 1. HINT"):
        predict_layout(step(), Layout(), 0)
    with pytest.raises(ValueError, match=r"no samples. HINT"):
        predict_layout(StepMemory([], {}, 0), Layout(), 2)
