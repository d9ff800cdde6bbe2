"""Rounds of checkpoint_io.py: folder, MiB of all ranks, rounds and result file."""

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import paceline
from paceline.checkpoint.saver import CheckpointSaver, Ranks, find_newest_valid, load_checkpoint
from paceline.checkpoint.shared_state import SharedState
from paceline.world.restoring import load_part

TENSORS = 16
STEP_SIZE = 384
BLOCK_BYTES = 1 << 22


class Model(torch.nn.Module):
    """Sharded parameters."""

    def __init__(self, shards: list[DTensor]) -> None:
        super().__init__()
        for number, shard in enumerate(shards):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(shard))


def main() -> None:
    folder, mib, rounds, result = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    world = paceline.init()
    rank, size = world.rank, world.size
    mesh = init_device_mesh("cpu", (size,))
    rows = (mib << 20) // (4 * 1024 * size * TENSORS)
    locals_ = [torch.randn(rows, 1024) for _ in range(TENSORS)]
    model = Model([DTensor.from_local(one, mesh, [Shard(0)]) for one in locals_])
    pages = mmap.mmap(-1, sum(one.nbytes for one in locals_))
    torch.cat([one.view(-1) for one in locals_], out=floats(pages))
    data = memoryview(pages)
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    saver = CheckpointSaver(folder / "ckpt", rank, size, store, print)
    raw = folder / f"raw-{rank}"
    shared = [0]
    first = locals_[3][0].clone()

    def write_raw(flags: int = 0) -> None:
        fd = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
        for at in range(0, len(data), BLOCK_BYTES):
            assert os.write(fd, data[at : at + BLOCK_BYTES]) == len(data[at : at + BLOCK_BYTES])
        os.fsync(fd)
        os.close(fd)

    def write_direct() -> None:
        write_raw(os.O_DIRECT)

    def save() -> None:
        shared[0] += 1
        state = SharedState({"models": [model.state_dict()]})
        saver.save(shared[0], state, {}, {})
        saver.wait()

    def read_raw() -> None:
        into = bytearray(BLOCK_BYTES)
        with raw.open("rb", buffering=0) as file:
            while file.readinto(into):
                pass

    def load() -> None:
        newest = find_newest_valid(folder / "ckpt", print, Ranks(rank, size, gather))
        assert newest is not None
        state = load_checkpoint(newest)[0]["models"][0]
        load_part(model, state, "model")
        assert torch.equal(model.weight3.to_local()[0], first)

    def gather(value: Any, _: Any) -> list[Any]:
        values = [None] * size
        dist.all_gather_object(values, value)
        return values

    def step() -> None:
        for _ in range(4):
            weight.mm(weight)
        dist.all_reduce(weight[0])

    weight = torch.randn(STEP_SIZE, STEP_SIZE)
    found: dict[str, list[float]] = {}
    pairs: list[list[tuple[str, Callable[[], None]]]] = [
        [("write_raw", write_raw), ("save", save), ("write_direct", write_direct)],
        [("read_raw", read_raw), ("load", load)],
    ]
    if not has_direct_writes(folder):
        pairs[0].pop()
    for number in range(-1, rounds):  # the first round is not counted
        for pair in pairs:
            for name, function in pair[:: 1 if number % 2 else -1]:
                if "raw" in name or name == "load":
                    forget([raw] if "raw" in name else list((folder / "ckpt").glob("*/*.pt")))
                seconds = timed(function)
                if number >= 0:
                    found.setdefault(name, []).append(seconds)
        quiet = steps_until(step, lambda: False, 200)
        began = time.perf_counter()
        shared[0] += 1
        saver.save(shared[0], SharedState({"models": [model.state_dict()]}), {}, {})
        copied = time.perf_counter() - began
        busy = steps_until(step, lambda: not saver.busy, 100_000)
        saver.wait()
        if number >= 0:
            for name, value in (("copy", copied), ("step", quiet), ("step_while_writing", busy)):
                found.setdefault(name, []).append(value)
    if rank == 0:
        Path(result).write_text(json.dumps(found))


def floats(pages: mmap.mmap) -> torch.Tensor:
    """Return the memory as a tensor."""
    return torch.frombuffer(pages, dtype=torch.float32)


def timed(function: Callable[[], None]) -> float:
    """Return the seconds until all ranks have ended."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def steps_until(step: Callable[[], None], ends: Callable[[], bool], limit: int) -> float:
    """Return the seconds of a step, of those until all ranks end."""
    began = time.perf_counter()
    for count in range(1, limit + 1):
        step()
        if count % 10 == 0:
            left = torch.tensor(float(not ends()))
            dist.all_reduce(left)
            if not left:
                break
    return (time.perf_counter() - began) / count


def has_direct_writes(folder: Path) -> bool:
    """Return whether files in the folder can be written without the page cache."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_WRONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


def forget(paths: list[Path]) -> None:
    """Remove files from the page cache, so that reading them reads the storage."""
    for path in paths:
        if path.exists():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
