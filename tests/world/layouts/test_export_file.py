"""``world.export`` writes the model of all layouts, with the parameters after training."""

import pytest
import ranks
import torch

from paceline.deploy.native_model import NativeModel

SCRIPT = """
import sys
import torch
from torch import nn
import paceline

def build():
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))

world = paceline.init(progress=False)
torch.manual_seed(0)
model = build()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = world.distribute(model, optimizer, layout=sys.argv[1])
for _ in range(2):
    x = torch.ones(4, 3)
    world.forward_backward(model, x, x, loss=lambda out, _: out.square().mean())
    world.step(optimizer)
options = {"inputs": "x: float32[batch,3]", "backends": ["builtin"]}
try:
    world.export(model, "unknown.paceline", **(options | {"backends": ["none"]}))
except ValueError as error:  # on all ranks, so that none waits
    print(f"rank {world.rank} was told: {error}", flush=True)
if sys.argv[1] != "data":
    try:
        world.export(model, "refused.paceline", **options)
    except ValueError as error:
        assert "HINT: world.export(..., build=" in str(error)
    options["build"] = build
result = world.export(model, "model.paceline", **options)
assert (result is None) == (world.rank > 0)
y = model.eval()(torch.ones(1, 3)).detach()
if world.rank == 0:
    torch.save(y, "y.pt")
"""


@pytest.mark.parametrize(
    "layout", ["data", *(pytest.param(one, marks=pytest.mark.long) for one in ("zero3", "pp2"))]
)
def test_parameters_are_gathered(tmp_path, layout):
    script = ranks.write(tmp_path, SCRIPT)
    done = ranks.run(script, layout, ranks=2)
    assert done.returncode == 0, done.stderr
    if layout == "data":
        assert "rank 0 was told: unknown backend none" in done.stdout
        assert "rank 1 was told: world.export failed on another rank" in done.stdout
    y = torch.empty(1, 2)
    with NativeModel(tmp_path / "model.paceline") as model:
        model.run([torch.ones(1, 3)], [y])
    assert torch.allclose(y, torch.load(tmp_path / "y.pt"), rtol=1e-5, atol=1e-6)
    assert not (tmp_path / "refused.paceline").exists()
