"""One writer of sets, in a process of its own.

    python write.py NAME FOLDER [KIND ...]

FOLDER: of benchmarks/data/packing.py, with KIND (class folders) or KIND.npy and KIND-labels.npy,
and "few-KIND", which is written before and not counted. Prints JSON: for each kind the seconds
until what was written is on its storage, of this call alone, and bytes of what was written.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SHARD = 256 << 20
CORES = len(os.sched_getaffinity(0))
THREADS = 2 * CORES  # as paceline pack has by itself
AHEAD = 8 * THREADS  # samples that are read before it is their turn, at most
Sample = tuple[Any, int]  # a file's bytes or an array, and its class


class Source:
    """A set as it is found: its samples by number, opened when it is their turn."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.arrays = kind.removeprefix("few-"), (folder / f"{kind}.npy").exists()
        if self.arrays:
            self.rows = np.load(folder / f"{kind}.npy", mmap_mode="r")
            self.labels = np.load(folder / f"{kind}-labels.npy").tolist()
        else:
            classes = sorted((folder / kind).iterdir())
            found = [(path, k) for k, one in enumerate(classes) for path in sorted(one.iterdir())]
            self.files, self.labels = [path for path, _ in found], [k for _, k in found]

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, i: int) -> Sample:
        if self.arrays:
            return np.array(self.rows[i]), self.labels[i]
        return self.files[i].read_bytes(), self.labels[i]

    def alone(self, i: int) -> Sample:
        """For who copies it anyway: an array may stay where it is."""
        return (self.rows[i], self.labels[i]) if self.arrays else self.load(i)


def one_by_one(source: Source, chosen: Iterable[int]) -> Iterator[Sample]:
    return map(source.alone, chosen)


def ahead(source: Source, chosen: Iterable[int]) -> Iterator[Sample]:
    """In their order, read by threads before it is their turn."""
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[Any] = deque()
        for i in chosen:
            waiting.append(pool.submit(source.load, i))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def plain(source: Source, samples: Iterable[Sample], to: Path) -> None:
    """No format: the bytes of one sample after the other, in files of a shard's size."""
    number = size = 0
    file = (to / "0").open("wb", 4 << 20)
    for data, _ in samples:
        if size > SHARD:
            file.close()
            number, size = number + 1, 0
            file = (to / str(number)).open("wb", 4 << 20)
        size += file.write(data)
    file.close()


def webdataset(source: Source, samples: Iterable[Sample], to: Path) -> None:
    import webdataset

    end = {"images": "jpg", "arrays": "npy", "texts": "txt"}[source.kind]
    pattern = str(to / "%06d.tar")
    with webdataset.ShardWriter(pattern, maxsize=SHARD, verbose=0) as sink:
        for i, (data, label) in enumerate(samples):
            sink.write({"__key__": f"{i:09}", end: data, "cls": label})


def mds(source: Source, samples: Iterable[Sample], to: Path) -> None:
    from streaming import MDSWriter

    kind = "ndarray:float32:12,120,120" if source.arrays else "bytes"
    columns = {"data": kind, "label": "int"}
    with MDSWriter(out=str(to), columns=columns, size_limit=SHARD) as out:
        for data, label in samples:
            out.write({"data": data, "label": label})


def tfrecord(source: Source, samples: Iterable[Sample], to: Path) -> None:
    import tensorflow as tf

    def features(data: Any, label: int) -> bytes:
        held = data.tobytes() if source.arrays else data
        feature = {
            "data": tf.train.Feature(bytes_list=tf.train.BytesList(value=[held])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        }
        return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()

    number = size = 0
    writer = tf.io.TFRecordWriter(str(to / f"{number:05}.tfrecord"))
    for data, label in samples:
        record = features(data, label)
        if size + len(record) > SHARD:
            writer.close()
            number, size = number + 1, 0
            writer = tf.io.TFRecordWriter(str(to / f"{number:05}.tfrecord"))
        writer.write(record)
        size += len(record)
    writer.close()


def array_record(source: Source, samples: Iterable[Sample], to: Path) -> None:
    """grain's format. A record is bytes: the label stands before the sample."""
    from array_record.python.array_record_module import ArrayRecordWriter

    number = size = 0
    options = "group_size:1,uncompressed"
    writer = ArrayRecordWriter(str(to / f"{number:05}.array_record"), options)
    for data, label in samples:
        record = label.to_bytes(8, "little") + (data.tobytes() if source.arrays else data)
        if size + len(record) > SHARD:
            writer.close()
            number, size = number + 1, 0
            writer = ArrayRecordWriter(str(to / f"{number:05}.array_record"), options)
        writer.write(record)
        size += len(record)
    writer.close()


Writes = Callable[[Source, Iterable[Sample], Path], None]
Reads = Callable[[Source, Iterable[int]], Iterator[Sample]]


def peer(writes: Writes, reads: Reads, folder: Path, kind: str, to: Path) -> None:
    source = Source(folder, kind)
    writes(source, reads(source, range(len(source))), to)


def _part(folder: Path, kind: str, to: Path, number: int) -> None:
    source = Source(folder, kind)
    chosen = range(number * len(source) // CORES, (number + 1) * len(source) // CORES)
    below = to / str(number)
    below.mkdir()
    mds(source, one_by_one(source, chosen), below)


def mds_processes(folder: Path, kind: str, to: Path) -> None:
    """As its documentation has it: parts in processes of their own, and one index of them."""
    from streaming.base.util import merge_index

    with multiprocessing.get_context("fork").Pool(CORES) as pool:
        pool.map(partial(_part, folder, kind, to), range(CORES))
    merge_index(str(to), keep_local=True)


def paceline(folder: Path, kind: str, to: Path, **options: Any) -> None:
    from paceline.data import pack

    array = folder / f"{kind}.npy"
    labels = folder / f"{kind}-labels.npy" if array.exists() else None
    pack(array if array.exists() else folder / kind, to, labels, shard_bytes=SHARD, **options)


WRITERS: dict[str, Callable[[Path, str, Path], None]] = {
    "plain copy": partial(peer, plain, one_by_one),
    "paceline": paceline,
    "paceline, no statistics": partial(paceline, statistics=0),
    "webdataset": partial(peer, webdataset, one_by_one),
    "webdataset, read ahead": partial(peer, webdataset, ahead),
    "streaming": partial(peer, mds, one_by_one),
    "streaming, read ahead": partial(peer, mds, ahead),
    "streaming, processes": mds_processes,
    "TFRecord": partial(peer, tfrecord, one_by_one),
    "TFRecord, read ahead": partial(peer, tfrecord, ahead),
    "ArrayRecord": partial(peer, array_record, one_by_one),
    "ArrayRecord, read ahead": partial(peer, array_record, ahead),
}


def stored(folder: Path) -> int:
    """Bytes below a folder, once they are on its storage."""
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                size += os.fstat(file.fileno()).st_size
    return size


def timed(name: str, folder: Path, kind: str) -> dict[str, float]:
    to = folder / "written"
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    os.sync()
    began = time.perf_counter()
    WRITERS[name](folder, kind, to)
    call = time.perf_counter() - began
    size = stored(to)
    took = time.perf_counter() - began
    shutil.rmtree(to)
    return {"s": took, "call_s": call, "bytes": size}


def main() -> None:
    name, folder, *kinds = sys.argv[1:]
    found = {}
    for kind in kinds:
        timed(name, Path(folder), f"few-{kind}")
        found[kind] = timed(name, Path(folder), kind)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
