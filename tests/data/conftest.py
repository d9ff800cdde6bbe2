"""A packed dataset that several test files share."""

import pytest
import sets

from paceline.data import pack


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Pack 30 images of (20, 24) in three classes into several shards; do not change them."""
    folder = tmp_path_factory.mktemp("set")
    pack(sets.images(folder / "in", 30), folder / "out", shard_bytes=5000)
    return folder / "out"
