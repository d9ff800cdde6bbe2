"""A training whose scaling law is planted by options: sleeps stand in for computing.

It does not use Paceline. All times are in milliseconds. The gradients are exchanged by all-reduce
after the backward pass. With ``--latency`` or ``--per-mib``, the backend "emulated" adds to gloo's
exchange what a ring on a slow network would take.
"""

import argparse
import concurrent.futures
import contextlib
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

MIB = 1 << 20


class Finished(dist.Work):
    """A Work that waits for a future."""

    def __init__(self, future: concurrent.futures.Future[None], tensors: Any) -> None:
        super().__init__()
        self._future, self._tensors = future, tensors

    def wait(self, timeout: Any = None) -> bool:
        self._future.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class EmulatedNetwork(dist.ProcessGroup):
    """gloo, on a network whose all-reduces take 2 (p - 1) a + 2 (p - 1) / p n b.

    One transfer at a time. It ends that long after the last member has arrived, or when gloo's
    exchange ends, if that is later. All ranks are on one machine and share its clock.
    """

    def __init__(self, inner: dist.ProcessGroup, latency_s: float, byte_s: float) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.latency_s, self.byte_s = inner, latency_s, byte_s
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._ends = 0.0

    def getBackendName(self) -> str:  # noqa: N802  torch calls it by this name
        return "emulated"

    def allreduce(self, tensors: Any, *given: Any, **options: Any) -> Any:
        p = self.size()
        nbytes = sum(one.nbytes for one in tensors)
        seconds = 2 * (p - 1) * self.latency_s + 2 * (p - 1) / p * nbytes * self.byte_s
        arrived = torch.tensor([time.monotonic()], dtype=torch.float64)
        latest = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX

        def run() -> None:
            both = [
                self.inner.allreduce([arrived], latest),
                self.inner.allreduce(tensors, *given, **options),
            ]
            for one in both:
                one.wait()
            self._ends = max(self._ends, float(arrived)) + seconds
            time.sleep(max(self._ends - time.monotonic(), 0.0))

        return Finished(self._thread.submit(run), tensors)

    def broadcast(self, *args: Any, **options: Any) -> Any:
        return self.inner.broadcast(*args, **options)

    def allgather(self, *args: Any, **options: Any) -> Any:
        return self.inner.allgather(*args, **options)

    def barrier(self, *args: Any, **options: Any) -> Any:
        return self.inner.barrier(*args, **options)


def register(latency_s: float, byte_s: float) -> None:
    def create(store: Any, rank: int, size: int, timeout: Any) -> EmulatedNetwork:
        return EmulatedNetwork(dist.ProcessGroupGloo(store, rank, size, timeout), latency_s, byte_s)

    dist.Backend.register_backend("emulated", create, devices=["cpu"])


class Samples(Dataset):
    """Samples that take a while to read: ``ms`` each."""

    def __init__(self, count: int, ms: float) -> None:
        self.count, self.ms = count, ms
        self.x = torch.ones(4)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.ms:
            time.sleep(1e-3 * self.ms * len(indices))
        return [(self.x, self.x[:1])] * len(indices)


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward pass sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    """A layer whose forward pass sleeps, and with ``--ddp`` its backward pass too.

    The gradients of ``large`` are ready before the backward pass sleeps.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.args = args
        self.random = random.Random(args.seed)
        if args.ddp:
            self.large = nn.Parameter(torch.zeros(int(args.mib * MIB / 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        args = self.args
        ms = args.fixed + args.sample * len(x)
        if args.crowded and dist.is_initialized():
            ms += args.crowded * len(x) * (dist.get_world_size() - 1)
        rank = dist.get_rank()
        if rank == args.slow_rank:
            ms += args.slow
        if args.jitter:
            ms = max(ms + self.random.gauss(0, args.jitter), 0.0)
        if not args.ddp:
            time.sleep(1e-3 * ms)
            return self.layer(x)
        time.sleep(1e-3 * ms / 3)
        return self.layer(SlowBackward.apply(x.requires_grad_(), 2e-3 * ms / 3)) + self.large[0]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    number = {"type": float, "default": 0.0}
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sample", type=float, default=1.0, help="ms of computing per sample")
    parser.add_argument("--fixed", **number, help="ms of computing per step")
    parser.add_argument("--crowded", **number, help="ms of computing per sample and other rank")
    parser.add_argument("--slow", **number, help="ms that one rank computes longer")
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--jitter", **number, help="standard deviation of computing, ms")
    parser.add_argument("--input", **number, help="ms per sample that a rank reads")
    parser.add_argument("--shared-input", **number, help="ms per sample of all ranks")
    parser.add_argument("--serial", **number, help="ms of other work per step, on each rank")
    parser.add_argument("--first-rank", **number, help="ms of other work per step, on rank 0")
    parser.add_argument("--of-all", **number, help="ms of other work on rank 0 per step and rank")
    parser.add_argument("--validate", **number, help="ms of a validation, every --every steps")
    parser.add_argument("--validate-rank", **number, help="ms of a validation on rank 0 per rank")
    parser.add_argument("--save", **number, help="ms of a checkpoint of rank 0, as often")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--on-all", action="store_true", help="every rank validates")
    parser.add_argument("--calls", type=int, default=1, help="all-reduces per step")
    parser.add_argument("--mib", type=float, default=0.001, help="MiB of each")
    parser.add_argument("--latency", **number, help="ms of latency of the emulated network")
    parser.add_argument("--per-mib", **number, help="ms per MiB on the emulated network")
    parser.add_argument("--ddp", action="store_true", help="DDP exchanges one vector of --mib")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class SlowFile:
    """A file that takes a while to write."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def write(self, data: bytes) -> int:
        time.sleep(self.left)
        self.left = 0.0
        return len(data)

    def flush(self) -> None:
        pass


def validate(net: Net, ms: float) -> None:
    """Evaluate ``ms`` on two batches."""
    held_out = DataLoader(Samples(8, 0.0), 4)
    net.eval()
    with torch.no_grad():
        for x, _ in held_out:
            net.layer(x)
            time.sleep(0.5e-3 * ms)
    net.train()


def main() -> None:
    args = options()
    emulated = args.latency or args.per_mib
    if emulated:
        register(1e-3 * args.latency, 1e-3 * args.per_mib / MIB)
    dist.init_process_group("emulated" if emulated else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    args.seed += 1000 * rank
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net(args)
    model = DistributedDataParallel(net) if args.ddp and size > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    data = Samples(args.steps * args.batch * size, args.input + args.shared_input * size)
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data))
    alone = args.first_rank + args.of_all * size
    validation = args.validate + args.validate_rank * size
    gradient = torch.zeros(max(int(args.mib * MIB / 4), 1))
    for step, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if size > 1 and not args.ddp:
            for _ in range(args.calls):
                dist.all_reduce(gradient)
        optimizer.step()
        if args.serial:
            time.sleep(1e-3 * args.serial)
        if alone and rank == 0:
            time.sleep(1e-3 * alone)
        if validation and step % args.every == 0 and (rank == 0 or args.on_all):
            validate(net, validation)
        if args.save and step % args.every == 0 and rank == 0:
            torch.save(net.state_dict(), SlowFile(1e-3 * args.save))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
