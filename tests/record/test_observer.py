"""Loader figures of an experiment: the start and the end of an epoch count as start time."""

from collections import OrderedDict

import pytest
import torch
from torch.optim import optimizer as optimizers

from paceline.record.experiments.observer import Observer
from paceline.record.hooks import taps


def test_loader_start_time_includes_first_batch_and_end_of_epoch():
    seen, batch = Observer(), torch.zeros(4)
    seen.begin_phase()
    for _ in range(2):
        seen.loader_started(1, 0.5)  # creates the iterator and loads its first batch
        seen.batch_fetched(1, batch, None)
        for _ in range(2):
            seen.batch_fetched(1, batch, 0.01)
        seen.loader_stopped(1, 0.2)
        seen.loader_stopped(2, 7.0)  # a different loader
    seen.end_phase("everything")
    used = seen.facts["used"]["everything"]
    assert used["starts"] == 2
    assert used["starting"] == pytest.approx(2 * (0.5 - 0.01 + 0.2))


def test_optimizer_hooks_of_the_script_run_when_the_setup_ends(monkeypatch):
    """PyTorch iterates over the hooks: none may be removed while they run."""
    monkeypatch.setattr(optimizers, "_global_optimizer_post_hooks", OrderedDict())
    observer, weight, calls = Observer(), torch.nn.Parameter(torch.zeros(4)), []
    taps.on_step(after=observer._note_optimizer)
    optimizers.register_optimizer_step_post_hook(lambda *_: observer.end_setup())
    optimizers.register_optimizer_step_post_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert calls == [1, 1, 1]
    assert observer.facts["parameters"] == {"float32": 16}
