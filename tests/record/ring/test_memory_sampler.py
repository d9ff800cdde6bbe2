"""Memory of a rank and its device, about one sample a second."""

from types import SimpleNamespace

import pytest
import torch

from paceline.record.ring.memory_sampler import MEMORY_INTERVAL_NS, MemorySampler
from paceline.record.ring.states import Memory

MS = 1_000_000
GIB = 1 << 30


class Notes:
    """Keeps what a sampler writes: kind of memory and bytes by the time in ms."""

    def __init__(self):
        self.found = {}

    def event(self, state, start, end, amount, peer):
        self.found.setdefault(start // MS, {})[Memory(peer)] = amount


@pytest.fixture
def allocated(monkeypatch):
    """Pretend to have two GPUs of 4 GiB; the bytes allocated on each."""
    used = [0, 0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used[device])
    properties = SimpleNamespace(total_memory=4 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return used


def test_memory_of_host_and_device_is_written_once_a_second(allocated):
    allocated[:] = [GIB // 2, GIB]
    notes = Notes()
    sampler = MemorySampler(notes)
    for at in range(0, 2 * MEMORY_INTERVAL_NS, 20 * MS):
        sampler.sample(at)
    assert list(notes.found) == [0, 1000]
    for kinds in notes.found.values():
        assert set(kinds) == set(Memory)
        assert kinds[Memory.DEVICE] == GIB
        assert kinds[Memory.DEVICE_AVAILABLE] == 3 * GIB


def test_device_is_seen_in_a_training_that_takes_less_than_a_second(allocated):
    notes = Notes()
    sampler = MemorySampler(notes)
    for at in range(0, 800 * MS, 20 * MS):
        allocated[0] = GIB if at > 400 * MS else 0
        sampler.sample(at)
    seen = [at for at, kinds in notes.found.items() if Memory.DEVICE in kinds]
    assert len(seen) == 1
    assert 400 < seen[0] < 500


def test_device_that_fails_is_not_asked_again(allocated, monkeypatch):
    asked = []

    def fail(device):
        asked.append(device)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "memory_allocated", fail)
    notes = Notes()
    sampler = MemorySampler(notes)
    for at in range(0, 3 * MEMORY_INTERVAL_NS, 20 * MS):
        sampler.sample(at)
    assert len(asked) == 1
    assert [set(kinds) for kinds in notes.found.values()] == [
        {Memory.HOST, Memory.HOST_AVAILABLE}
    ] * 3
