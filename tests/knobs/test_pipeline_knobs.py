"""Knobs of pipelines: micro-batches, schedule and division in place of the script's."""

from functools import partial

import pytest
import thread_ranks
import torch
from torch import nn

from paceline.knobs import knob, layouts
from paceline.knobs.settings import unfit
from paceline.study.diagnose.try_remedies import _value

at_exit = []


@pytest.fixture
def requested(monkeypatch):
    at_exit.clear()
    monkeypatch.setattr(knob, "_requests", {})
    monkeypatch.setattr(knob.atexit, "register", lambda *call: at_exit.append(partial(*call)))

    def request(**values):
        for name, value in values.items():
            layouts.set_pipeline_option(value, knob.KnobResult(name.replace("_", "-")))
        return [turned for _, turned in knob._requests.values()]

    return request


def distribute(world, layout):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 4)
    model, optimizer = world.distribute(
        model, optimizer, layout=layout, balance=["2"], example_inputs=x[:2]
    )
    loss = world.forward_backward(model, x, x, loss=nn.functional.mse_loss).item()
    return str(world.layouts[0]), sorted({n.split(".")[0] for n in model.state_dict()}), loss


def test_settings_take_the_place_of_what_the_script_says(requested):
    plain = thread_ranks.run(lambda world: distribute(world, "pp2 + schedule=gpipe"))
    turned = requested(micro_batches=2, pipeline_schedule="zero-bubble", pipeline_balance="1")
    found = thread_ranks.run(lambda world: distribute(world, "pp2 + schedule=gpipe"))
    layout = "pp2 + schedule=zero-bubble + micro-batches=2"
    assert [one[:2] for one in found] == [(layout, ["0"]), (layout, ["1", "2", "3"])]
    assert [one[1] for one in plain] == [["0", "1"], ["2", "3"]]
    assert found[0][2] == pytest.approx(plain[0][2])
    assert all(one.set for one in turned)


def test_a_layout_without_stages_is_left_and_said(requested):
    turned = requested(micro_batches=2)
    world_layout = thread_ranks.alone(
        lambda world: (
            world.distribute(nn.Linear(2, 2), layout="data"),
            str(world.layouts[0]),
        )
    )[1]
    assert world_layout == "data"
    at_exit[0]()
    assert "no layout with stages. HINT: layout='pp2'" in turned[0].why_not


def test_values():
    assert _value("pipeline-balance", "1.10, 2") == "1.10, 2"  # names, and no numbers
    assert _value("micro-batches", "8") == 8
    assert "names of modules" in unfit("pipeline-balance", "1,,2")
    assert "or 'zero-bubble'" in unfit("pipeline-schedule", "zb")
