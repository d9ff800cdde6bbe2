"""Batches of a run are read again only from a folder that no other user can write to."""

import pytest
import torch
from torch import nn

from paceline.observe.replays import stored_run
from paceline.security.files import UnsafeFileError


def test_batches_in_a_folder_that_is_open_to_others_are_not_read(tmp_path):
    path = stored_run.batch_path(tmp_path, (0, 1, 2), 0)
    path.parent.mkdir()
    torch.save(({"x": torch.ones(2)}, {}), path)
    path.parent.chmod(0o700)
    batch, _ = stored_run.load_batch(path)
    assert batch["x"].tolist() == [1.0, 1.0]
    path.parent.chmod(0o770)
    with pytest.raises(UnsafeFileError, match="open to other users"):
        stored_run.load_batch(path)


def test_only_the_last_bits_of_parameters_are_changed_and_no_random_number_is_drawn():
    torch.manual_seed(0)
    model, low = nn.Linear(50, 20), nn.Linear(8, 8, dtype=torch.bfloat16)
    before, generator = model.weight.detach().clone(), torch.get_rng_state()
    stored_run.perturb(model, 2.0)
    stored_run.perturb(low, 2.0)
    change = ((model.weight.detach() - before) / before).abs()
    assert 0 < change.max() <= 3 * torch.finfo(torch.float32).eps
    assert (change > 0).float().mean() > 0.3
    assert torch.equal(torch.get_rng_state(), generator)
    assert low.weight.isfinite().all()
