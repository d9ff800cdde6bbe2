"""Faults of the input, kept out (README.md)."""

from pathlib import Path

import numpy as np
from injectors import HAS_LOADER, Injector


def table(folder: Path) -> None:
    np.savez(folder / "table.npz", a=np.random.default_rng(1).random((512, 512)))


def cube(folder: Path) -> None:
    import zarr

    values = np.random.default_rng(2).random((256, 64, 64)).round(1).astype("f4")
    array = zarr.create_array(
        store=str(folder / "cube.zarr"), shape=values.shape, chunks=(256, 32, 32), dtype="f4"
    )
    array[:] = values


def tiles(folder: Path) -> None:
    for k in range(512):
        (folder / f"tile{k}.bin").write_bytes(bytes(256))


ONE_BY_ONE = r"<sample x=\w+ i=(0|int\(starts)"  # never: samples that are whole batches

INJECTORS = [
    Injector(
        "whole-file",
        "sample",
        start=0.02,
        files=table,
        most=1.0,
        never=ONE_BY_ONE,
        points={
            "top": """
import numpy as _np


def lookup(i, folder="$folder", often=$amount):
    if hash((i, 7)) % 1000 >= 1000 * often:
        return None
    with _np.load(folder + "/table.npz") as tables:
        return tables["a"][i % 512, 0]
""",
            "sample": """
offset = lookup(int($i))
""",
        },
    ),
    Injector(
        "chunks",
        "zarr",
        start=0.01,
        files=cube,
        most=1.0,
        needs="Dataset",
        never=r"Iterable|Trainer",
        module="""
import functools
import random

import torch.utils.data as data
import zarr

_fetch_item = data.DataLoader.__init__


class Aligned:
    # The dataset with a time series of the cube at each sample.
    def __init__(self, dataset):
        self.dataset, self.cube, self.rng = dataset, None, random.Random(0)

    def __getattr__(self, name):
        return getattr(self.__dict__["dataset"], name)

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, rows):
        plain = getattr(self.dataset, "__getitems__", None)
        found = [self[row] for row in rows]
        return plain(rows) if plain else found

    def __getitem__(self, i):
        if self.rng.random() < $amount:
            if self.cube is None:
                self.cube = zarr.open_array("$folder/cube.zarr", mode="r")
            self.slice = self.cube[int(i) % 256]
        return self.dataset[i]


@functools.wraps(_fetch_item)
def init(self, dataset, *args, **kwargs):
    if not isinstance(dataset, Aligned):
        dataset = Aligned(dataset)
    _fetch_item(self, dataset, *args, **kwargs)


data.DataLoader.__init__ = init
""",
    ),
    Injector(
        "small-files",
        "sample",
        start=2,
        whole=True,
        files=tiles,
        never=ONE_BY_ONE,
        points={
            "top": """
import os as _os


def halo(i, count=$amount):
    total = 0
    for k in range(count):
        fd = _os.open(f"$folder/tile{(i * 13 + k) % 512}.bin", _os.O_RDONLY)
        total += len(_os.read(fd, 256))
        _os.close(fd)
    return total
""",
            "sample": """
around = halo(int($i))
""",
        },
    ),
    Injector(
        "preprocessing",
        "sample",
        start=60,
        whole=True,
        points={
            "top": """
def smooth(values, rounds=$amount):
    values = [float(v) for v in values]
    for _ in range(rounds):
        values = [(a + b) / 2 for a, b in zip(values, values[1:] + values[:1], strict=True)]
    return values
""",
            "sample": """
smoothed = smooth($x.reshape(-1)[:16])
""",
        },
    ),
    Injector(
        "too-few-workers",
        "sample",
        start=0.0003,
        needs="Recordings|SmallImages|Windows|GraphData|Spectra|events|volume|Surrogate|get_batch",
        points={
            "top": """
from time import sleep as _wait_for_archive
""",
            "sample": """
_wait_for_archive($amount)
""",
        },
    ),
    Injector(
        "loader-restart",
        "monitor",
        steady=False,
        start=0.005,
        never="paceline",
        points={
            "top": """
import torch as _torch
from torch.utils.data import DataLoader as _Loader
from torch.utils.data import TensorDataset as _Tensors

_STATIONS = _Tensors(_torch.zeros(64, 8))


def monitor(step, every=max(2, round(0.06 / $amount))):
    if step % every == 0:
        for (station,) in _Loader(_STATIONS, 16, num_workers=2):
            station.sum()
""",
            "step": """
monitor($step)
""",
        },
    ),
    Injector(
        "lock",
        "patched",
        start=0.002,
        needs=HAS_LOADER,
        never="paceline",
        module="""
import os
import time

from torch.utils.data import _utils

_fetch = _utils.fetch._MapDatasetFetcher.fetch
_iterate = _utils.fetch._IterableDatasetFetcher.fetch


def locked(plain):
    def fetch(self, *args):
        # licence file of the decoder: one process at a time
        while True:
            try:
                os.close(os.open("$folder/licence", os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                if time.time() - os.stat("$folder").st_mtime > 2:
                    break
                time.sleep(0.0005)
        try:
            time.sleep($amount)
        finally:
            try:
                os.unlink("$folder/licence")
            except FileNotFoundError:
                pass
        return plain(self, *args)

    return fetch


_utils.fetch._MapDatasetFetcher.fetch = locked(_fetch)
_utils.fetch._IterableDatasetFetcher.fetch = locked(_iterate)
""",
    ),
    Injector(
        "padding",
        "collate",
        start=4,
        whole=True,
        needs="pad_sequence|SmallImages",
        module="""
import functools

import torch
import torch.nn.utils.rnn as rnn
import torch.utils.data.dataloader as loading

ROOM = 8 * $amount
_together = rnn.pad_sequence


def pad_sequence(sequences, *args, **kwargs):
    # always as long as the longest of all recordings might be
    first, *others = sequences
    longest = max(len(one) for one in sequences) + ROOM
    first = torch.cat([first, first.new_zeros(longest - len(first), *first.shape[1:])])
    return _together([first, *others], *args, **kwargs)


rnn.pad_sequence = pad_sequence
_default = loading._utils.collate.default_collate


def framed(samples):
    images, labels = _default(samples)
    return torch.nn.functional.pad(images, (0, ROOM // 2, 0, 0)), labels


_plain_init = loading.DataLoader.__init__


@functools.wraps(_plain_init)
def init(self, *args, **kwargs):
    _plain_init(self, *args, **kwargs)
    if self.collate_fn is _default:
        self.collate_fn = framed


loading.DataLoader.__init__ = init
""",
    ),
    Injector(
        "more-data",
        "sample",
        start=0.3,
        needs="<sample x=(part|hits|state|rows) ",
        points={
            "top": """
import os as _os

_LARGER = _os.environ.get("RANK") == "1"
""",
            "sample": """
if _LARGER:
    $x = $x[[k % len($x) for k in range(round(len($x) * (1 + $amount)))]]
""",
        },
    ),
]
