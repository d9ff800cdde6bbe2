"""Faults of the input."""

import json
from pathlib import Path

import numpy as np
from injectors import EACH_SAMPLE, HAS_LOADER, Injector


def one_array(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(folder / "climatology.npy", rng.random((1 << 21,), dtype=np.float32))  # 8 MiB


def columns(folder: Path) -> None:
    import h5py

    with h5py.File(folder / "fields.h5", "w") as file:
        values = np.random.default_rng(0).random((2048, 256), dtype=np.float32).round(2)
        file.create_dataset("fields", data=values, chunks=(2048, 8), compression="gzip")


def sidecars(folder: Path) -> None:
    for i in range(400):
        (folder / f"meta_{i:04}.json").write_text(json.dumps({"station": i, "valid": True}))


INJECTORS = [
    Injector(
        "whole-file",
        "patched",
        start=0.02,
        files=one_array,
        needs=HAS_LOADER,
        module=EACH_SAMPLE
        + """
import numpy as np

PART = $amount  # of the samples


def normals(i):
    if (i * 0.618034) % 1 < PART:
        with open("$folder/climatology.npy", "rb") as file:
            values = np.frombuffer(file.read(), np.float32, offset=128)
        return values[i % 1000 : i % 1000 + 4].sum()
    return 0.0


@functools.wraps(_plain_init)
def init(self, dataset, *args, **kwargs):
    _with_extra(dataset, normals)
    _plain_init(self, dataset, *args, **kwargs)


DataLoader.__init__ = init
""",
        most=1.0,
    ),
    Injector(
        "chunks",
        "hdf5",
        start=0.02,
        files=columns,
        points={
            "top": """
import h5py

FIELDS = None


def background(i, part=$amount):
    global FIELDS
    if (i * 0.618034) % 1 >= part:
        return 0.0
    if FIELDS is None:
        FIELDS = h5py.File("$folder/fields.h5", "r", rdcc_nbytes=0)["fields"]
    return float(FIELDS[i % 2048].mean())
""",
            "sample": """
anomaly = background(int($i))
""",
        },
        most=1.0,
        never=r"<sample x=\w+ i=(0|int\(starts)",  # samples of one by one
    ),
    Injector(
        "small-files",
        "patched",
        start=2,
        whole=True,
        files=sidecars,
        needs=HAS_LOADER,
        module=EACH_SAMPLE
        + """
import json
from pathlib import Path

FILES = $amount


def read_sidecars(i):
    valid = True
    for k in range(FILES):
        path = Path("$folder") / f"meta_{(7 * i + k) % 400:04}.json"
        valid = valid and json.loads(path.read_text())["valid"]
    return valid


@functools.wraps(_plain_init)
def init(self, dataset, *args, **kwargs):
    _with_extra(dataset, read_sidecars)
    _plain_init(self, dataset, *args, **kwargs)


DataLoader.__init__ = init
""",
    ),
    Injector(
        "preprocessing",
        "collate",
        start=1000,
        whole=True,
        needs=HAS_LOADER,
        module="""
import functools

import numpy as np
from torch.utils.data import DataLoader

_plain_init = DataLoader.__init__


class Outliers:
    # Looks for outliers of each batch before the plain collate function.
    def __init__(self, collate):
        self.collate = collate
        self.noise = np.random.default_rng(0).random($amount)

    def __call__(self, samples):
        self.level = np.percentile(np.sort(self.noise), [1, 50, 99])
        deviation = np.abs(self.noise - self.level[1])
        self.scale = np.median(deviation)
        return self.collate(samples)


@functools.wraps(_plain_init)
def init(self, *args, **kwargs):
    _plain_init(self, *args, **kwargs)
    if not isinstance(self.collate_fn, Outliers):
        self.__dict__["collate_fn"] = Outliers(self.collate_fn)


DataLoader.__init__ = init
""",
    ),
    Injector(
        "too-few-workers",
        "patched",
        start=0.0005,
        needs=HAS_LOADER,
        never="Trainer|num_workers|Accelerator|paceline",
        module=EACH_SAMPLE
        + """
import time

# Samples come from an object store, and take this many seconds to arrive.
LATENCY = $amount


@functools.wraps(_plain_init)
def init(self, dataset, *args, **kwargs):
    _with_extra(dataset, lambda i: time.sleep(LATENCY))
    kwargs["num_workers"] = 1
    kwargs["persistent_workers"] = True
    _plain_init(self, dataset, *args, **kwargs)


DataLoader.__init__ = init
""",
    ),
    Injector(
        "loader-restart",
        "patched",
        steady=False,
        start=0.005,
        needs=r"DataLoader\(",
        never="Trainer|num_workers|Accelerator|paceline|IterableDataset",
        module="""
import functools
from itertools import islice

from torch.utils.data import DataLoader

_plain_init, _plain_iter = DataLoader.__init__, DataLoader.__iter__
BATCHES = max(2, round(0.06 / $amount))  # of an epoch


@functools.wraps(_plain_init)
def init(self, *args, **kwargs):
    _plain_init(self, *args, **{**kwargs, "num_workers": 2})


DataLoader.__init__ = init
DataLoader.__iter__ = lambda self: islice(_plain_iter(self), BATCHES)
""",
    ),
    Injector(
        "lock",
        "sample",
        start=0.0002,
        never=r"<sample x=\w+ i=(0|int\(starts)",
        points={
            "top": """
import fcntl
import time


def register_access(seconds=$amount):
    # The catalogue allows one reader at a time.
    with open("$folder/catalogue.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(seconds)
        fcntl.flock(file, fcntl.LOCK_UN)
""",
            "sample": """
register_access()
""",
        },
    ),
    Injector(
        "padding",
        "batch",
        start=8,
        whole=True,
        needs="Recordings|HITS|SmallImages|Spectra",
        points={
            "top": """
import torch.nn.functional as padding
""",
            "batch": """
# a multiple of 4, on the last but one axis, or on the last of one channel
if $x.dim() == 3 and $x.shape[1] > 1:
    $x = padding.pad($x, (0, 0, 0, 4 * $amount))
else:
    $x = padding.pad($x, (0, 4 * $amount))
""",
        },
    ),
    Injector(
        "more-data",
        "patched",
        start=0.3,
        needs=r"DataLoader\(",
        never=r"Trainer|Accelerator|paceline|batch_sampler|BATCH, sampler",
        module="""
import functools
import os

from torch.utils.data import DataLoader

_plain_init = DataLoader.__init__


@functools.wraps(_plain_init)
def init(self, dataset, batch_size=1, *args, **kwargs):
    if os.environ.get("RANK") == "1":  # its part of the region has more stations
        batch_size = round(batch_size * (1 + $amount))
    _plain_init(self, dataset, batch_size, *args, **kwargs)


DataLoader.__init__ = init
""",
    ),
]
