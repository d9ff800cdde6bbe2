"""A packed set that several files read."""

import pytest
import sets

from paceline.data import pack


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """30 images of (20, 24) in three classes, in several shards; not to be changed."""
    folder = tmp_path_factory.mktemp("set")
    pack(sets.images(folder / "in", 30), folder / "out", shard_bytes=5000)
    return folder / "out"
