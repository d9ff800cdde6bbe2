"""What a rank sends of each optimizer step."""

import json
import os

import pytest
import torch

from paceline.record.ring.recorder import Recorder
from paceline.record.watch.step_watch import StepWatch, parameter_bits


@pytest.fixture
def messages(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv("PACELINE_STATUS", f"{os.getpid()}:{write}")
    yield lambda: [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]
    os.close(read)
    os.close(write)


def watch_of(step=0):
    recorder = Recorder(0, 1, enabled=False)
    recorder.step = step
    recorder.step_watch = StepWatch(recorder, True)
    return recorder, recorder.step_watch


def train(recorder, watch, optimizer, losses, samples=8):
    for loss in losses:
        optimizer.zero_grad()
        parameter = optimizer.param_groups[0]["params"][0]
        watch.note_loss(torch.tensor(loss))
        parameter.grad = torch.full_like(parameter, 3.0)
        watch._before_step(optimizer)
        recorder.samples = samples
        recorder.end_of_step()


def test_rows_have_loss_rate_and_norm(messages):
    recorder, watch = watch_of()
    parameter = torch.nn.Parameter(torch.zeros(4))
    train(recorder, watch, torch.optim.SGD([parameter], lr=0.5), [2.0, 1.0])
    model, *steps = split(messages())
    assert model == {"shapes": [[4]], "tensors": 1, "elements": 4, "sharded": False}
    assert [row[:6] for row in steps] == [[1, 8, 8, 2.0, 0.5, 6.0], [2, 16, 8, 1.0, 0.5, 6.0]]


def split(found):
    """Return the model and the rows of messages."""
    models = [one["model"] for one in found if "model" in one]
    return [models[0], *(row for one in found for row in one.get("steps", []))]


def test_loss_of_several_backwards_is_their_mean(messages):
    recorder, watch = watch_of()
    watch.note_loss(torch.tensor(1.0))
    watch.note_loss(torch.tensor(4.0))
    recorder.end_of_step()
    assert split(messages())[1][3] == 2.5


def test_resumed_run_continues_its_samples(messages):
    recorder, _ = watch_of(step=100)
    recorder.samples = 8
    recorder.end_of_step()
    assert split(messages())[1][:3] == [101, 808, 8]


def test_loss_is_taken_before_the_script_changes_it(messages):
    recorder, watch = watch_of()
    loss = torch.tensor(1.0)
    watch.note_loss(loss)
    loss.mul_(5)
    recorder.end_of_step()
    assert split(messages())[1][3] == 1.0


def test_checksum_sees_each_bit():
    first, second = torch.randn(5), torch.randn(3, 3, dtype=torch.float64)
    usual = int(parameter_bits([first, second]))
    assert int(parameter_bits([first.clone(), second.clone()])) == usual
    assert int(parameter_bits([second, first])) != usual
    first[2] = torch.nextafter(first[2], torch.tensor(10.0))
    assert int(parameter_bits([first, second])) != usual
    assert parameter_bits([]) is None
