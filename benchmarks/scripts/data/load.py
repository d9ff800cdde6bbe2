"""One loader over one set, in a process of its own: an epoch to warm up, and some that count.

    python load.py NAME KIND FOLDER EPOCHS

KIND: "images" (JPEGs, FOLDER/files and FOLDER/images) or "arrays" (FOLDER/arrays.npy and
FOLDER/arrays). Prints JSON: for each epoch processor seconds a sample, of all its processes, and
samples/s.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, WORKERS = {"images": 64, "arrays": 32}, 2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # what the kernel's figures are exact to
Epoch = Callable[[], Iterator[Any]]


def alone(kind: str, folder: Path) -> Epoch:
    """The work itself, without a loader, a checksum, or batches that go anywhere: as many
    processes as loaders have threads, each with its part of the batches. A fresh array a sample,
    and those of a batch are there at a time."""
    import simplejpeg

    from paceline.data.shards import ScratchBuffer, Shards

    shards, scratch = Shards(folder / kind), ScratchBuffer()
    blobs = (
        [bytes(shards.read_raw(i, scratch)[1]) for i in range(len(shards))]
        if kind == "images"
        else []
    )
    rows = np.load(folder / "arrays.npy", mmap_mode="r") if kind == "arrays" else None
    order = np.random.default_rng(0).permutation(len(shards)).tolist()
    batches = [order[at : at + BATCH[kind]] for at in range(0, len(order), BATCH[kind])]

    def one(i: int) -> Any:
        return simplejpeg.decode_jpeg(blobs[i]) if rows is None else np.array(rows[i])

    def works(number: int, end: Any) -> None:
        while end.recv():
            for batch in batches[number::WORKERS]:
                _held = [one(i) for i in batch]
            end.send(True)

    context = multiprocessing.get_context("fork")
    ends = []
    for number in range(WORKERS):
        end, other = context.Pipe()
        context.Process(target=works, args=(number, other), daemon=True).start()
        ends.append(end)

    def epoch() -> Iterator[Any]:
        for end in ends:
            end.send(True)
        for end in ends:
            end.recv()
        yield from batches

    return epoch


def own(kind: str, folder: Path) -> Epoch:
    from paceline.data import Loader

    loader = Loader(folder / kind, BATCH[kind], shuffle=True, num_workers=WORKERS)
    return lambda: (x for x, _ in loader)


def torch_shards(kind: str, folder: Path) -> Epoch:
    """The same files, through DataLoader's processes."""
    from torch.utils.data import DataLoader

    from paceline.data import Shards

    more = {"num_workers": WORKERS, "persistent_workers": True}
    loader = DataLoader(Shards(folder / kind), BATCH[kind], shuffle=True, **more)
    return lambda: (x for x, _ in loader)


def torch_files(kind: str, folder: Path) -> Epoch:
    """A file a sample, PIL or np.load, through DataLoader's processes."""
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        names = sorted((folder / f"{kind}-files").rglob("*.*"))

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, i: int) -> Any:
            if kind == "arrays":
                return np.load(self.names[i]), i
            return np.asarray(Image.open(self.names[i]).convert("RGB")), i

    more = {"num_workers": WORKERS, "persistent_workers": True}
    loader = DataLoader(Files(), BATCH[kind], shuffle=True, **more)
    return lambda: (x for x, _ in loader)


def decoder(kind: str) -> Callable[[bytes], Any]:
    import simplejpeg

    shape = (12, 120, 120)
    if kind == "images":
        return simplejpeg.decode_jpeg
    return lambda data: np.frombuffer(data, np.float32).reshape(shape)


def grain(kind: str, folder: Path) -> Epoch:
    """ArrayRecord, with grain's own threads."""
    import grain.python as grain

    source = grain.ArrayRecordDataSource(str(folder / f"{kind}.array_record"))
    made = grain.MapDataset.source(source).shuffle(seed=0).map(decoder(kind))
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH[kind])
    return lambda: iter(made.to_iter_dataset(options).batch(BATCH[kind]))


def spdl(kind: str, folder: Path) -> Epoch:
    """spdl's pipeline of threads, over the same shards."""
    from spdl.pipeline import PipelineBuilder

    from paceline.data.shards import ScratchBuffer, Shards

    shards, decode, own = Shards(folder / kind), decoder(kind), threading.local()

    def load(i: int) -> Any:
        own.scratch = own.__dict__.get("scratch") or ScratchBuffer()
        array = decode(shards.read_raw(i, own.scratch)[1])
        return array.copy() if kind == "arrays" else array  # it is in the scratch

    def epoch() -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(len(shards)).tolist()
        builder = PipelineBuilder().add_source(iter(order)).pipe(load, concurrency=WORKERS)
        builder = builder.aggregate(BATCH[kind]).pipe(np.stack).add_sink(2)
        pipeline = builder.build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    return epoch


def tensorstore(kind: str, folder: Path) -> Epoch:
    """A zarr store with a chunk a sample; arrays only."""
    import tensorstore as ts

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "arrays.zarr")}}
    limits = {
        "data_copy_concurrency": {"limit": WORKERS},
        "file_io_concurrency": {"limit": WORKERS},
    }
    store = ts.open(spec, context=ts.Context(limits)).result()

    def epoch() -> Iterator[Any]:
        order = np.random.default_rng(0).permutation(store.shape[0])
        parts = [order[at : at + BATCH[kind]] for at in range(0, len(order), BATCH[kind])]
        waiting = [store[parts[0]].read()]
        for part in parts[1:]:
            waiting.append(store[part].read())
            yield waiting.pop(0).result()
        yield waiting.pop(0).result()

    return epoch


def dali(kind: str, folder: Path) -> Epoch:
    """DALI on the processor, fed from the same shards."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    from paceline.data.shards import ScratchBuffer, Shards

    shards, scratch, batch = Shards(folder / kind), ScratchBuffer(), BATCH[kind]
    blobs = [
        np.frombuffer(bytes(shards.read_raw(i, scratch)[1]), np.uint8) for i in range(len(shards))
    ]
    if kind == "arrays":
        blobs = [blob.view(np.float32).reshape(12, 120, 120) for blob in blobs]
    order = np.random.default_rng(0).permutation(len(shards)).tolist()

    def fed() -> Iterator[list[Any]]:
        while True:
            for at in range(0, len(order), batch):
                part = [blobs[i] for i in order[at : at + batch]]
                yield part + part[:1] * (batch - len(part))

    pipe = Pipeline(batch_size=batch, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    with pipe:
        data = fn.external_source(source=fed(), device="cpu")
        if kind == "images":
            data = fn.decoders.image(data, device="cpu", output_type=types.RGB)
        pipe.set_outputs(data)
    pipe.build()

    def epoch() -> Iterator[Any]:
        for at in range(0, len(order), batch):
            whole = pipe.run()[0].as_tensor()
            yield np.asarray(whole)[: min(batch, len(order) - at)]

    return epoch


LOADERS = {
    "work alone": alone,
    "paceline": own,
    "DataLoader, shards": torch_shards,
    "DataLoader, files": torch_files,
    "grain": grain,
    "spdl": spdl,
    "tensorstore": tensorstore,
    "DALI": dali,
}


def processor_s() -> float:
    """Of this process and all below it, those that still run as well."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(told[1])
            used[int(entry.name)] = sum(map(int, told[11:15]))
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used[pid] for pid in family if pid in used) * TICK_S


def main() -> None:
    name, kind, folder, epochs = sys.argv[1:]
    epoch = LOADERS[name](kind, Path(folder))
    found = []
    for number in range(int(epochs) + 1):
        before, began, count = processor_s(), time.perf_counter(), 0
        for batch in epoch():
            count += len(batch)
        took = time.perf_counter() - began
        if number:
            spent = max(processor_s() - before, TICK_S)
            found.append({"cpu_s": spent / count, "rate": count / took})
    print(json.dumps({"samples": count, "epochs": found}))


if __name__ == "__main__":
    main()
