"""Errors that name non-finite values, and ranks whose parameters have diverged."""

import pytest
import ranks
import torch

from paceline.parallel.mesh import Mesh
from paceline.record.ring.recorder import Recorder
from paceline.world.training_checks import FiniteCheck, finite_flags

TRAIN = """
    import sys, torch
    from torch import nn
    import paceline

    what, options = sys.argv[1].split(","), dict(pair.split("=") for pair in sys.argv[2:])
    world = paceline.init(progress=False, **options)

    class Root(nn.Module):  # whose gradient at 0 is infinite, and its value is not
        at = None
        def forward(self, x):
            return (x * 0).sqrt() if self.at else x

    root = Root()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), root, nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer)
    last = world.rank == world.size - 1
    heard = ""
    for epoch in world.epochs(2):
        for step in range(10):
            root.at = "gradient" in what and (epoch, step) == (1, 3) and last
            loss = model(torch.randn(3, 4)).square().mean()
            if "loss" in what and last and epoch and step > 2:
                loss = loss * float("nan")
            world.backward(loss)
            world.step(optimizer, clip=1.0 if step % 2 else None)
            here = (epoch, step, world.rank) == (0, 6, 1)
            if "apart" in what and here:
                with torch.no_grad():
                    model.module[3].weight[0, 0] += 0.125
            if "rounding" in what and here:
                with torch.no_grad():
                    model.module[4].weight[0, 0] *= 1 + 2**-22
    print("done")
"""


def said_by(tmp_path, *args, number=2, fails=True, **options):
    script = ranks.write(tmp_path, TRAIN)
    result = ranks.run(script, *args, ranks=number, check=not fails, **options)
    assert (result.returncode != 0) == fails
    assert ("done" in result.stdout) != fails
    return result.stderr


def test_nonfinite_gradient_is_reported_with_rank_step_and_layer(tmp_path):
    said = said_by(tmp_path, "rounding,gradient")
    first = "the gradient of 0.bias (and of 1 more, which the backward reaches later)"
    assert f"rank 1 failed: ValueError: {first} is not finite on rank 1 at step 13" in said
    assert "Traceback" not in said
    assert "warning: rank 1's parameters differ from rank 0's in rounding" in said
    assert said.count("differ") == 1
    said = said_by(tmp_path, "gradient", launcher="python")
    assert f"{first} is not finite on rank 0 at step 13" in said


@pytest.mark.long
def test_nonfinite_and_replica_checks_can_warn_or_be_ignored(tmp_path):
    said = said_by(tmp_path, "apart,loss", "nonfinite=warn", "replicas=warn", fails=False)
    assert "warning: rank 1's parameters differ from rank 0's at step 10" in said
    assert "warning: the loss is nan on rank 1 at step 13" in said
    # Two ranks warn: rank 1's loss makes rank 0's gradient non-finite.
    assert said.count("This rank prints no further warnings of this kind.") == 2
    said = said_by(tmp_path, "apart,loss", "nonfinite=ignore", "replicas=ignore", fails=False)
    assert "nan" not in said
    assert "differ" not in said
    said = said_by(tmp_path, "loss", "nonfinite=no", launcher="python")
    assert "nonfinite must be one of 'raise', 'warn', 'ignore'; this is 'no'" in said


def test_rank_with_diverged_parameters_is_reported_with_layer(tmp_path):
    said = said_by(tmp_path, "apart", number=3)
    assert (
        "rank 1's parameters differ from the other ranks' at step 10 (at step 0 they were "
        "equal), first in 3.weight, by up to 0.1"
    ) in said


@pytest.mark.parametrize("is_finite", [True, False])
def test_sparse_gradients_are_checked(world, is_finite):
    model = torch.nn.Embedding(5, 3, sparse=True)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    world.backward(model(torch.tensor([1, 3])).square().mean())
    if not is_finite:
        model.weight.grad._values()[0, 0] = float("inf")
        with pytest.raises(ValueError, match=r"the gradient of weight is not finite"):
            world.step(optimizer)
    else:
        assert world.step(optimizer)


def test_large_gradient_whose_norm_overflows_is_finite():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    check = FiniteCheck(Mesh(0, 1), "raise", Recorder(0, 1, enabled=False), [])
    weight.grad = torch.tensor([1e30, -1e30])
    check.check_before_step(optimizer)
    weight.grad[0] = float("nan")
    with pytest.raises(ValueError, match="is not finite"):
        check.check_before_step(optimizer)


def test_finite_flags_do_not_overflow():
    half = torch.full((4,), 6e4, dtype=torch.float16)
    infinite = torch.tensor([1.0, float("-inf")])
    for tensors in (
        [half, half],
        [half, torch.full((4,), 3e38), torch.tensor([1e300], dtype=torch.float64)],
    ):
        assert finite_flags(tensors).all()
    assert finite_flags([torch.ones(2), infinite, infinite * 0]).tolist() == [True, False, False]
    assert finite_flags([half, infinite, half.double()]).tolist() == [True, False, True]
