"""Every layout gives the result of one process with the same global batch size, to rounding."""

import shutil
from pathlib import Path

import layout_training
import pytest
import ranks
import thread_ranks
import torch

SCRIPT = """
    import itertools, sys
    import torch
    import paceline
    from layout_training import train

    out, layouts, models, optimizers = sys.argv[1], *(a.split(",") for a in sys.argv[2:5])
    world = paceline.init(seed=5, progress=False)
    combinations = itertools.product(layouts, models, optimizers)
    results = {
        f"{l} {m} {o}": train(world, l, m, o, dropout=float(sys.argv[5]))
        for l, m, o in combinations
    }
    if world.rank == 0:
        torch.save(results, out)
"""
SHARDED = ("zero1", "zero2", "zero3")


def train(folder, number, layouts, models, optimizers, dropout=0.0, launcher="paceline"):
    """Train on processes."""
    script = ranks.write(folder, SCRIPT)
    shutil.copy(Path(layout_training.__file__), folder)
    out = folder / f"{number}-{layouts}.pt"
    words = [out, layouts, models, optimizers, dropout]
    ranks.run(script, *words, ranks=number, launcher=launcher)
    return torch.load(out)


def check(folder, numbers, layouts, models, optimizers):
    alone = train(folder, 1, "data", models, optimizers, launcher="python")
    for number in numbers:
        results = train(folder, number, ",".join(layouts), models, optimizers)
        for combination, result in results.items():
            _, _, rest = combination.partition(" ")
            compare(combination, result, alone[f"data {rest}"])


def compare(combination, result, reference):
    """Compare losses and parameters to rounding, and the random states of common ranks exactly."""
    losses, state, random = result
    assert losses == pytest.approx(reference[0], rel=1e-5), combination
    assert list(state) == list(reference[1])
    for name, tensor in reference[1].items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    assert random[: len(reference[2])] == reference[2], combination


def check_threads(number, layouts, model, optimizer):
    alone = thread_ranks.alone(lambda w: layout_training.train(w, "data", model, optimizer), seed=5)
    for layout in layouts:
        found = thread_ranks.run(
            lambda w, one=layout: layout_training.train(w, one, model, optimizer), number, seed=5
        )
        compare(f"{layout} {model} {optimizer}", found[0], alone)


def test_layouts_equal_one_process():
    check_threads(3, SHARDED, "transformer", "adam")


@pytest.mark.parametrize("optimizer", ["lars", pytest.param("lamb", marks=pytest.mark.long)])
def test_norms_of_lars_and_lamb_are_those_of_whole_layers(optimizer):
    check_threads(3, ("data", *SHARDED), "transformer", optimizer)


def test_momentum_and_lstm_equal_one_process(tmp_path):
    check(tmp_path, [2], ["zero3"], "lstm,cnn", "momentum")


def test_dropout_draws_the_same_numbers_in_every_layout(tmp_path):
    results = train(tmp_path, 2, ",".join(("data", *SHARDED)), "transformer", "adam", dropout=0.3)
    reference = results["data transformer adam"]
    assert reference[2][0] != reference[2][1]
    for combination, result in results.items():
        compare(combination, result, reference)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "fused"])
@pytest.mark.parametrize("model", list(layout_training.MODELS))
@pytest.mark.parametrize("number", [2, 4])
def test_all_models_and_optimizers_equal_one_process(number, model, optimizer):
    check_threads(number, SHARDED, model, optimizer)


@pytest.mark.long
def test_ranks_of_several_models_equal_one_process(tmp_path):
    check(tmp_path, [3], SHARDED, "transformer,lstm,cnn", "adam,fused")
