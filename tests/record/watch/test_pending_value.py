"""Values of a GPU that are read without waiting for it.

No GPU is involved: its tensors have no values, so that reading one is an error.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from fake_gpu import fake_gpu
from paceline.record import pending_value
from paceline.record.hooks import hook_failures
from paceline.record.pending_value import PendingCopy, PendingValue, completed_future, devices_of
from paceline.record.ring.recorder import Recorder
from paceline.record.watch import step_watch
from paceline.record.watch.step_watch import StepWatch


def test_copy_is_awaited_on_the_stream_of_the_tensors_device(monkeypatch):
    with fake_gpu(monkeypatch) as recorded:
        copy = PendingCopy(torch.ones(3, device="cuda:1"))
        assert recorded == [torch.device("cuda:1")]
        assert not copy.is_known
        assert copy._host.device.type == "cpu"


def test_copy_of_a_tensor_without_data_has_none_either(monkeypatch):
    """As with --show-memory: the mode of the tensor is not active, and its values are answered."""
    with fake_gpu(monkeypatch):
        tensor = torch.ones(3, device="cuda:0")
        with unset_fake_temporarily():
            copy = PendingCopy(tensor)
    assert isinstance(copy._host, FakeTensor)
    assert copy._host.device.type == "cpu"


def test_copy_of_the_host_does_not_change_with_the_tensor():
    tensor = torch.ones(1)
    value = PendingValue(tensor)
    tensor.zero_()
    assert value.is_known
    assert value.read() == 1.0


def test_guard_reads_no_value_of_a_gpu_in_a_step(monkeypatch):
    monkeypatch.setattr(step_watch, "is_whole", lambda tensor: True)
    monkeypatch.setattr(hook_failures, "failed_hooks", set())
    recorder = Recorder(0, 1, enabled=False)
    watch = StepWatch(recorder, True)
    with fake_gpu(monkeypatch):
        parameters = [torch.nn.Parameter(torch.ones(4, device=f"cuda:{n}")) for n in range(2)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        rate = torch.tensor(0.5, device="cuda:0")  # of an optimizer that can be captured
        optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
        optimizer.param_groups[0]["lr"] = rate
        watch.note_loss(torch.ones((), device="cuda:0"))
        watch._before_step(optimizer)
        watch.after_step(8)
        (step,) = watch._waiting
        values = [*step.losses, step.rate, step.norm]
        assert [value.is_known for value in values] == [False] * 3


def test_guard_notes_nothing_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert pending_value.is_capturing()
    watch = StepWatch(Recorder(0, 1, enabled=False), True)
    watch.note_loss(torch.ones(()))
    watch.after_step(8)
    assert not watch._losses
    assert not watch._waiting


def test_future_is_made_for_the_devices_of_its_tensors(monkeypatch):
    """One made for the CPU holds an error instead of tensors of a GPU."""
    with fake_gpu(monkeypatch):
        buckets = [torch.ones(2, device="cuda:1"), torch.ones(2, device="cuda:0"), torch.ones(2)]
    assert devices_of({"of": [buckets]}) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert completed_future([buckets[2]]).value()[0] is buckets[2]
