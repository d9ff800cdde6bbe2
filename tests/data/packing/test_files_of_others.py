"""Files and folders of others with the names of Paceline's are neither removed nor replaced."""

import numpy as np
import pytest

from paceline.data import pack
from paceline.data.packing.export import convert


def private(path, **files):
    """Create a folder of the user's with files that must stay."""
    path.mkdir()
    for name in ("thesis", "rank-00000.pt", *files):
        (path / name).write_text("private")
    return path


def content(path):
    return {one.name for one in path.iterdir()}


@pytest.mark.parametrize("name", ["shard-00000.bin", "index.bin", "names.txt"])
@pytest.mark.parametrize("fresh", [False, True])
def test_pack_does_not_remove_files_of_others(tmp_path, name, fresh):
    folder = private(tmp_path / "out", **{name: ""})
    with pytest.raises(ValueError, match=f"contains {name}, which is not of a packed dataset"):
        pack(np.zeros((4, 2)), folder, fresh=fresh)
    assert (folder / name).read_text() == "private"
    assert pack(np.zeros((4, 2)), tmp_path / "other").meta.samples == 4
    assert pack(np.zeros((4, 2)), tmp_path / "other", fresh=True).meta.samples == 4


def test_pack_does_not_use_work_folder_of_others(tmp_path):
    (tmp_path / "out").mkdir()
    other = private(tmp_path / "out" / ".packing", lock="")
    with pytest.raises(ValueError, match="was not created by Paceline"):
        pack(np.zeros((4, 2)), tmp_path / "out")
    assert content(other) == {"thesis", "rank-00000.pt", "lock"}


@pytest.mark.parametrize("name", [".x.part", ".x.packed"])
def test_export_does_not_remove_folders_of_others(tmp_path, name):
    other = private(tmp_path / name)
    with pytest.raises(ValueError, match="was not created by Paceline"):
        convert(np.zeros((4, 2)), tmp_path / "x", "webdataset")
    assert content(other) == {"thesis", "rank-00000.pt"}


def test_export_does_not_replace_folder_with_files_of_others(tmp_path):
    convert(np.zeros((4, 2)), tmp_path / "x", "webdataset")
    convert(np.zeros((4, 2)), tmp_path / "x", "webdataset", fresh=True)
    (tmp_path / "x" / "notes.txt").write_text("private")  # formats ignore it
    with pytest.raises(ValueError, match=r"contains notes\.txt, which is not a file of the format"):
        convert(np.zeros((4, 2)), tmp_path / "x", "webdataset", fresh=True)
    assert (tmp_path / "x" / "notes.txt").read_text() == "private"
