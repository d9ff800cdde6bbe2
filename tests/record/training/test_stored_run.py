"""Batches of a run are read again only from a folder that no other user can write to."""

import pytest
import torch

from paceline.record.training.replays import stored_run
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
