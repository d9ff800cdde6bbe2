"""Compute layers or train a U-Net with one implementation of divided samples.

    spatial_peer.py OUT {paceline,shardtensor} layers
    spatial_peer.py OUT {paceline,shardtensor} steps [--size 32] [--width 8] [--steps 4]

Two ranks write JSON. ``paceline`` and the steps of both need a launcher; the layers of
``shardtensor`` start two ranks each, because a layer that fails on one rank leaves the other one
waiting. Paceline is not imported for ShardTensor, which may be in an environment without it.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spatial_models import LAYERS, UNet
from torch import nn
from torch.profiler import ProfilerActivity, profile

LIMIT_S = 30.0  # of a layer of ShardTensor on two ranks
WARM = 2  # steps
NETWORKS = {"3-D U-Net with group norm": 2, "3-D U-Net with batch norm": 0}  # groups


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("name", choices=["paceline", "shardtensor"])
    parser.add_argument("what", choices=["layers", "steps"])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.name == "shardtensor":
        import physicsnemo.domain_parallel

        physicsnemo.domain_parallel.register_custom_ops()  # it does so itself only with CUDA
    if args.what == "steps":
        world = start(args.name)
        found = {
            f"{count} x {args.size}^3": Steps(args, world, count).measure()
            for count in args.samples
        }
        rank = dist.get_rank()
    elif args.name == "paceline":
        layers, rank = layers_of_paceline()
        found = {"layers": layers, "versions": versions("paceline", "torch")}
    else:
        layers, rank = layers_of_shardtensor(), 0
        found = {"layers": layers, "versions": versions("nvidia-physicsnemo", "torch")}
    if rank == 0:
        args.out.write_text(json.dumps(found))


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def cases() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield all layers as float64 models with an input, the same on all ranks."""
    for number, (name, layers) in enumerate(LAYERS.items()):
        for layer, shape in layers:
            torch.manual_seed(number)
            # a layer before it, so that it gets a gradient for its input
            model = nn.Sequential(nn.Conv2d(4, 4, 1), layer).double()
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            yield name, model, torch.randn(shape, dtype=torch.float64)
    for name, groups in NETWORKS.items():
        torch.manual_seed(0)
        yield name, UNet(4, groups).double(), torch.randn(1, 1, 16, 16, 16, dtype=torch.float64)


def difference(plain: nn.Module, model: nn.Module, whole: torch.Tensor, x: torch.Tensor) -> float:
    """Return the largest relative difference of output, gradients and running statistics.

    Args:
        plain: The model on one rank.
        model: The model whose output on parts is ``whole``.
        whole: The gathered output.
        x: The input of one rank.
    """
    wanted = plain(x)
    if whole.shape != wanted.shape:
        return 1.0  # other positions, without an error
    weights = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator())
    (whole * weights).sum().backward()
    (wanted * weights).sum().backward()
    pairs = [(whole, wanted)]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        pairs.append((gathered(one.grad), other.grad))
    scale = max(b.norm().item() for _, b in pairs)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        pairs.append((gathered(one).double(), other.double()))
    return max((a - b).norm().item() for a, b in pairs) / scale


def gathered(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def layers_of_paceline() -> tuple[list[dict[str, Any]], int]:
    import paceline

    world = paceline.init(progress=False, record=False)
    found = []
    for name, plain, x in cases():
        model = world.distribute(copy.deepcopy(plain), layout="h2", compare=False)
        try:
            own = torch.tensor(difference(plain, model, world.whole(model(x)), x))
            dist.all_reduce(own, dist.ReduceOp.MAX)
            of: dict[str, Any] = {"difference": own.item()}
        except (RuntimeError, ValueError, NotImplementedError) as error:
            of = {"error": reason(error)}
        found.append({"layer": name, "shape": list(x.shape), **of})
    return found, world.rank


def layers_of_shardtensor() -> list[dict[str, Any]]:
    """Compute each layer on two forked ranks."""
    return [
        {"layer": name, "shape": list(x.shape), **on_two_ranks(plain, x)}
        for name, plain, x in cases()
    ]


def on_two_ranks(plain: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Return the larger difference of two ranks, or the first error of one of them."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            fork.Process(target=forked_rank, args=(rank, Path(folder) / "store", plain, x, end))
            for rank, (_, end) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
        try:
            for _, end in ends:
                end.close()
            return answers([reader for reader, _ in ends])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def answers(readers: list[Connection]) -> dict[str, Any]:
    differences, until = [], time.monotonic() + LIMIT_S
    while readers:
        ready = wait(readers, until - time.monotonic())
        if not ready:
            return {"error": f"no result within {LIMIT_S:g} s"}
        for reader in ready:
            assert isinstance(reader, Connection)
            readers.remove(reader)
            try:
                of = reader.recv()
            except EOFError:
                of = {"error": "a rank ended without a result"}
            if "error" in of:
                return dict(of)
            differences.append(of["difference"])
    return {"difference": max(differences)}


def forked_rank(rank: int, store: Path, plain: nn.Module, x: torch.Tensor, end: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of each layer
    dist.init_process_group(
        *("gloo", f"file://{store}", timedelta(seconds=LIMIT_S)), rank=rank, world_size=2
    )
    try:
        model = copy.deepcopy(plain)
        end.send(
            {"difference": difference(plain, model, model(parts(x, x.dim() - 2)).full_tensor(), x)}
        )
    except Exception as error:  # whatever it raises is a layer that cannot be used
        end.send({"error": reason(error)})


def reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def parts(x: torch.Tensor, dim: int) -> Any:
    """Return a ShardTensor that is divided along one dim."""
    from physicsnemo.domain_parallel import ShardTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    own = x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()
    return ShardTensor.from_local(own, mesh, [Shard(dim)], "chunk", tuple(x.shape))


def start(name: str) -> Any:
    """Start the process group; return Paceline's world."""
    if name == "paceline":
        import paceline

        return paceline.init(progress=False, record=False)
    dist.init_process_group("gloo")
    return None


class Steps:
    """Training of a U-Net with group normalization, which both implementations can run."""

    def __init__(self, args: Any, world: Any, samples: int) -> None:
        self.count = args.steps
        torch.manual_seed(0)
        model = UNet(args.width, groups=4)
        x, y = torch.randn(2, samples, 1, *[args.size] * 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.forward: Callable[[], torch.Tensor]
        self.backward: Callable[[torch.Tensor], None]
        self.update: Callable[[], None]
        if world:
            split, optimizer = world.distribute(model, optimizer, layout="d2", compare=False)
            self.forward = lambda: (split(x) - y).square().mean()
            self.backward = world.backward
            self.update = lambda: world.step(optimizer)
            return
        inputs, targets = parts(x, 2), parts(y, 2)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        self.forward = lambda: (model(inputs) - targets).square().mean()
        self.backward = lambda loss: loss.backward()
        self.update = update

    def step(self) -> torch.Tensor:
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss

    def measure(self) -> dict[str, Any]:
        losses = [number(self.step()) for _ in range(WARM)]
        times = []
        for _ in range(self.count):
            dist.barrier()
            began = time.perf_counter()
            loss = self.step()
            times.append(time.perf_counter() - began)
            losses.append(number(loss))
        return {"step_s": statistics.median(times), "losses": losses, **self.memory()}

    def memory(self) -> dict[str, int]:
        """Return bytes of PyTorch's allocator in a step: at most, and those left by the forward."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            loss = self.forward()
        of_forward = allocated(found)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            self.backward(loss)
        self.update()
        peak = max(itertools.accumulate([*of_forward, *allocated(found)]))
        return {"kept_bytes": sum(of_forward), "peak_bytes": peak}


def allocated(found: Any) -> list[int]:
    """Return the changes of the allocated bytes, in the order of time."""
    events = found.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


def number(loss: Any) -> float:
    """Return the loss of the whole sample."""
    whole = gathered(loss.detach())
    return float(whole.item())


if __name__ == "__main__":
    main()
