"""A checkpoint of another model is refused in each layout, with the first differing names."""

import re

import pytest
import ranks
import torch
from torch import nn

from paceline.world.restoring import load_part

SCRIPT = """
    import sys
    import torch
    from pathlib import Path
    from torch import nn
    import paceline
    from paceline.checkpoint.saver import load_checkpoint
    from paceline.world.restoring import load_part

    world = paceline.init(progress=False)
    def plain(width=5, bias=True):
        return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2, bias=bias))

    def train(layout, model):
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = world.distribute(model, optimizer, layout=layout)
        for epoch in world.epochs(1, checkpoint="ckpt"):
            world.backward(model(torch.ones(2, 3)).sum())
            world.step(optimizer)

    if sys.argv[1] == "save":
        train(sys.argv[2], plain())
    elif sys.argv[1] == "resume":
        train(sys.argv[2], plain(width=6, bias=False))
    else:
        shared, _, _ = load_checkpoint(Path("ckpt/step-00000001"))
        for layout in ("data", "zero1", "zero2", "zero3"):
            for kind in (torch.optim.Adam, torch.optim.SGD):
                model = plain(width=6, bias=False)
                optimizer = kind(model.parameters())
                model, optimizer = world.distribute(model, optimizer, layout=layout)
                for part, name in ((model, "models"), (optimizer, "optimizers")):
                    try:
                        load_part(getattr(part, "module", part), shared[name][0], name)
                    except ValueError as error:
                        if world.rank == 0:
                            print(f"{layout} {kind.__name__} {name}: {error}", flush=True)
"""
MODEL = (
    "the checkpoint does not fit this script's models: 0.weight has shape (5, 3) in the checkpoint "
    "and (6, 3) in the model; 0.bias has shape (5,) in the checkpoint and (6,) in the model; "
    "1.weight has shape (2, 5) in the checkpoint and (2, 6) in the model; and 1 more. HINT: resume"
)
GROUPS = "the numbers of parameters in the groups of the {} are [4] in the checkpoint and [3] in"


def test_every_layout_names_the_difference(tmp_path):
    script = ranks.write(tmp_path, SCRIPT)
    ranks.run(script, "save", "zero2")
    done = ranks.run(script, "load")
    lines = [re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines()]
    found = dict(line.split(": ", 1) for line in lines if re.match(r"(data|zero\d) \w+ ", line))
    for layout in ("data", "zero1", "zero2", "zero3"):
        for kind in ("Adam", "SGD"):
            assert found.pop(f"{layout} {kind} models").startswith(MODEL)
            assert GROUPS.format(kind) in found.pop(f"{layout} {kind} optimizers")
    assert not found


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data", "zero1", "zero2", "zero3"])
def test_run_ends_before_its_first_step(tmp_path, layout):
    script = ranks.write(tmp_path, SCRIPT)
    ranks.run(script, "save", "data")
    done = ranks.run(script, "resume", layout, check=False)
    assert done.returncode
    assert MODEL in done.stderr
    assert "Traceback" not in done.stderr


def saved(kind, **options):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_of_another_kind_of_optimizer():
    _, adam = saved(torch.optim.Adam, lr=0.1)
    _, momentum = saved(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(
        ValueError, match=r"this script's optimizers: the SGD has no option amsgrad, betas.*HINT"
    ):
        load_part(momentum, adam.state_dict(), "optimizers")


def test_parameters_in_another_order():
    _, adam = saved(torch.optim.Adam, lr=0.1)
    model, _ = saved(torch.optim.Adam)
    turned = torch.optim.Adam(list(model.parameters())[::-1])
    said = (
        r"exp_avg of the Adam's parameter 0 has shape \(5, 3\) in the checkpoint, and the "
        r"parameter \(2,\) in the script"
    )
    with pytest.raises(ValueError, match=said):
        load_part(turned, adam.state_dict(), "optimizers")


@pytest.mark.parametrize("removed", ["decoupled_weight_decay", "initial_lr"])
def test_options_that_one_version_or_a_scheduler_adds_are_accepted(removed):
    _, adam = saved(torch.optim.Adam, lr=0.1)
    torch.optim.lr_scheduler.StepLR(adam, 1)
    state = adam.state_dict()
    del state["param_groups"][0][removed]
    _, other = saved(torch.optim.Adam, lr=0.2)
    load_part(other, state, "optimizers")
    assert other.param_groups[0]["lr"] == 0.1
