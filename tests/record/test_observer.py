"""Loader figures of an experiment: the start and the end of an epoch count as start time."""

import pytest
import torch

from paceline.record.experiments.observer import Observer


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
