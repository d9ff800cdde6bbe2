"""A folder of unpacked files as a dataset."""

import pickle

import numpy as np
import pytest
import sets
import torch
from PIL import Image

from paceline.data import DataError, Files, Loader


def test_unpacked_image_folder_is_loaded(tmp_path):
    files = Files(sets.images(tmp_path, 30))
    assert (len(files), files.classes, files.images) == (30, 3, True)
    for i in range(30):
        path, offset, size = files.location(i)
        array, label = files[i]
        assert (offset, size) == (0, path.stat().st_size)
        assert sets.CLASSES[label] == path.parent.name
        assert np.abs(array.astype(int) - np.asarray(Image.open(path))).mean() < 2
    loader = Loader(files, 10, shuffle=True)
    x, _ = next(iter(loader))
    assert x.shape == (10, 3, 20, 24)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert sum(len(labels) for _, labels in loader) == 30
    assert len(pickle.loads(pickle.dumps(files))) == 30


def test_npy_files_with_label_table(tmp_path):
    x, _ = sets.arrays(6, (3, 4))
    for i, one in enumerate(x):
        np.save(tmp_path / f"{i}.npy", one)
    table = tmp_path / "labels.csv"
    table.write_text("".join(f"{i}.npy,{i / 2},{-i}\n" for i in range(6)))
    given, labels = next(iter(Loader(Files(tmp_path, table), 6)))
    assert np.array_equal(given, x)
    assert labels.tolist() == [[i / 2, -i] for i in range(6)]


def test_unreadable_file_is_reported_by_name(tmp_path):
    folder = sets.images(tmp_path, 30)
    files = Files(folder)
    gone, cut = files.location(3)[0], files.location(4)[0]
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:40])
    with pytest.raises(DataError, match=f"{gone.name}: can't be read: No such file"):
        files[3]
    with pytest.raises(DataError, match=cut.name):
        files[4]
    with pytest.warns(UserWarning, match=gone.name):
        assert sum(len(y) for _, y in Loader(files, 10, on_error="skip")) == 28
    Image.new("RGB", (9, 7)).save(files.location(5)[0])
    with pytest.raises(ValueError, match=r"sample 5 is uint8 of \(7, 9, 3\)"):
        files.read_into(5, np.empty((1, 20, 24, 3), np.uint8), None, 0, None)


def test_files_that_are_not_arrays_need_a_transform(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("a" * (i + 1))
    with pytest.raises(ValueError, match="HINT: Loader"):
        next(iter(Loader(Files(tmp_path), 2)))
    sizes = Loader(Files(tmp_path), 4, transform=lambda text: np.float32(len(text)))
    assert next(iter(sizes)).tolist() == [1, 2, 3, 4]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no files"):
        Files(tmp_path / "empty")
