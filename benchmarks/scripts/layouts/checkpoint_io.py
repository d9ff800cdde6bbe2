"""Rounds of checkpoint_io.py: folder, MiB of all ranks, rounds and result file."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import paceline
from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shard_content import verify_shards
from paceline.checkpoint.shared_state import SharedState
from paceline.world.restoring import load_part

TENSORS = 16
STEP_SIZE = 384
BLOCK_BYTES = 1 << 22


def sharded_model(rows: int, size: int) -> nn.Module:
    """Return a model whose parameters are sharded over the ranks by rows."""
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Module()
    for i in range(TENSORS):
        shard = DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
        model.register_parameter(f"weight{i}", nn.Parameter(shard))
    return model


def main() -> None:
    folder, mib, rounds, result = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    world = paceline.init()
    rank, size = world.rank, world.size
    model = sharded_model((mib << 20) // (4 * 1024 * size * TENSORS), size)
    shards = [parameter.to_local().detach() for parameter in model.parameters()]
    data = memoryview(torch.cat(shards).numpy()).cast("B")
    store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
    saver = CheckpointSaver(folder / "ckpt", rank, size, store, print)
    raw = folder / f"raw-{rank}"
    shared = [0]

    def write_raw() -> None:
        with raw.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

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
        newest = folder / f"ckpt/step-{shared[0]:08}"
        verify_shards(newest, read_manifest(newest), [rank])
        dist.barrier()
        shards[3].zero_()
        load_part(model, load_checkpoint(newest)[0]["models"][0], "models")
        assert shards[3].any()

    def step() -> None:
        for _ in range(4):
            weight.mm(weight)
        dist.all_reduce(weight[0])

    weight = torch.randn(STEP_SIZE, STEP_SIZE)
    found: dict[str, list[float]] = {}
    pairs: list[list[tuple[str, Callable[[], None]]]] = [
        [("write_raw", write_raw), ("save", save)],
        [("read_raw", read_raw), ("load", load)],
    ]
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


def forget(paths: list[Path]) -> None:
    """Remove files from the page cache, so that reading them reads the storage."""
    for path in paths:
        if path.exists():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
