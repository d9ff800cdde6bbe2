"""10,000 random corruptions of packed datasets: all are detected without a crash or a hang."""

import random

import corrupt
import numpy as np
import pytest
import sets

from paceline.data import pack

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("kind", ["images", "arrays", "compressed"])
def test_random_dataset_corruptions_are_detected(tmp_path, kind):
    whole = tmp_path / "whole"
    if kind == "images":
        pack(sets.images(tmp_path / "in", 12), whole, shard_bytes=4000)
    else:
        x, _ = sets.arrays(12)
        labels = np.arange(24.0).reshape(12, 2)
        pack(x, whole, labels, shard_bytes=300, compress=kind == "compressed")
    draw = random.Random(kind)
    for _ in range(3334):
        done = corrupt.damaged(whole, tmp_path / "copy", draw)
        assert corrupt.noticed(tmp_path / "copy"), done
