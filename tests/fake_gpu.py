"""Tensors of a GPU that does not exist: a value that the host reads raises an error."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


class Event:
    """An event that has not happened."""

    def query(self):
        return False


class Stream:
    def __init__(self, recorded, device):
        self._recorded, self._device = recorded, device

    def record_event(self):
        self._recorded.append(self._device)
        return Event()


@contextmanager
def fake_gpu(monkeypatch):
    """Make tensors of devices such as "cuda:1"; yield the devices whose streams record events."""
    recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(recorded, device))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield recorded
