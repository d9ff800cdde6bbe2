"""A plain DDP script with options that plant faults. It does not use Paceline."""

import argparse
import contextlib
import gc
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

INPUTS = 64  # number of values of a sample
LARGE = 64 << 20  # bytes of the large file that samples are read from
CHUNK = 1 << 20
SMALL = 4 << 10
FILES = 512


def busy(seconds: float) -> None:
    """Keep a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Samples(Dataset):
    """Dataset whose samples wait, compute and read files.

    Attributes:
        sleep: Seconds that a sample waits.
        work: Seconds that a sample computes.
        small: Number of small files in the folder that a sample opens.
        large: Number of bytes that a sample reads from the open large file.
    """

    def __init__(self, count: int, args: argparse.Namespace, folder: Path | None = None) -> None:
        self.count, self.folder = count, folder
        each = 1 / args.batch
        self.sleep, self.work = args.load_sleep * each, args.load_work * each
        self.small, self.large = args.load_small, args.load_large
        dtype = torch.float64 if args.double else torch.float32
        self.x = torch.randn(INPUTS, dtype=dtype)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sleep:
            time.sleep(self.sleep)
        if self.work:
            busy(self.work)
        if self.folder is not None:
            self.read(i)
        return self.x, self.x[:1]

    def read(self, i: int) -> None:
        for k in range(self.small):
            with open(self.folder / f"{(i * self.small + k) % FILES}", "rb") as file:
                file.read()
        if self.large:
            with open(self.folder / "large", "rb", buffering=0) as file:
                for k in range(self.large // CHUNK):
                    file.seek((i * CHUNK + k * CHUNK) % (LARGE - CHUNK))
                    file.read(CHUNK)


class Sequences(Dataset):
    """Dataset of samples of different lengths, up to ``longer`` times the shortest.

    Each sample is one batch.
    """

    def __init__(self, count: int, longer: float, dim: int = 256) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths = (64 * (1 + (longer - 1) * torch.rand(count, generator=generator))).int()
        self.dim = dim

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(int(self.lengths[i]), self.dim)
        return x, x[:, :1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--products", type=int, default=0, help="computed beside the layers")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--epoch", type=int, default=200, help="steps of an epoch")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true", help="workers that live on")
    parser.add_argument("--load-sleep", type=float, default=0.0, help="s a batch")
    parser.add_argument("--load-work", type=float, default=0.0, help="s a batch")
    parser.add_argument("--load-small", type=int, default=0, help="small files that a sample opens")
    parser.add_argument("--load-large", type=int, default=0, help="bytes that a sample reads")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", type=float, default=0.0, help="s a step that it computes longer")
    parser.add_argument("--longer", type=float, default=0.0, help="longest sequence to shortest")
    parser.add_argument("--sequence-products", type=int, default=0, help="uses of its layer")
    parser.add_argument("--reduces", type=int, default=0, help="small all-reduces a step")
    parser.add_argument("--barriers", type=int, default=0, help="barriers a step")
    parser.add_argument("--prints", type=int, default=0, help="lines that a step prints")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--layers", type=int, default=0, help="of 256 x 256, beside the first two")
    parser.add_argument("--by-hand", action="store_true", help="all-reduce after the backward")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards a step")
    parser.add_argument("--local", action="store_true", help="one exchange for all of these")
    parser.add_argument(
        "--unused", action=argparse.BooleanOptionalAction, help="search for unused parameters"
    )
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--touch", type=int, default=0, help="bytes that are new in each step")
    parser.add_argument("--reuse", action="store_true", help="and are not, by hand")
    parser.add_argument("--collect", type=int, default=0, help="objects that a collection visits")
    parser.add_argument("--holder", type=float, default=0.0, help="cores a thread of Python takes")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--on-core", type=int, default=-1, help="that all ranks bind themselves to")
    parser.add_argument("--validate", type=float, default=0.0, help="s on rank 0, each 5 steps")
    parser.add_argument("--save", type=float, default=0.0, help="s on rank 0, each 5 steps")
    parser.add_argument("--script", type=float, default=0.0, help="s a step, outside of all else")
    return parser.parse_args()


class SlowFile:
    """File-like object that takes a given time for all writes and discards the data."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def write(self, data: bytes) -> int:
        time.sleep(self.seconds)
        self.seconds = 0.0
        return len(memoryview(data))

    def flush(self) -> None:
        pass


def validate(net: nn.Module, loader: DataLoader, seconds: float) -> None:
    end = time.perf_counter() + seconds
    net.eval()
    with torch.no_grad():
        while time.perf_counter() < end:
            for x, y in loader:
                nn.functional.mse_loss(net(x), y)
                if time.perf_counter() >= end:
                    break
    net.train()


def network(args: argparse.Namespace) -> nn.Module:
    if args.longer:
        # One layer, applied repeatedly: much computation, little gradient synchronization.
        return nn.Sequential(*[nn.Linear(256, 256)] * args.sequence_products, nn.Linear(256, 1))
    inner = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
    parts = [nn.Linear(INPUTS, args.width), nn.ReLU(), *inner, nn.Linear(args.width, 1)]
    net = nn.Sequential(*parts)
    return net.double() if args.double else net


def hold(share: float) -> None:
    while True:
        busy(0.1 * share)
        if share < 1:
            time.sleep(0.1 * (1 - share))


def files() -> Path:
    """Return a folder on this machine with the files that samples read; create it if needed."""
    folder = Path(tempfile.gettempdir()) / f"paceline-scorecard-{os.getuid()}"
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        (folder / "large").write_bytes(os.urandom(LARGE))
        for i in range(FILES):
            (folder / f"{i}").write_bytes(os.urandom(SMALL))
        (folder / "done").touch()
    return folder


def set_up(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.on_core >= 0:
        os.sched_setaffinity(0, {args.on_core})
    if args.holder:
        threading.Thread(target=hold, args=(args.holder,), name="monitor", daemon=True).start()


def main() -> None:
    args = options()
    set_up(args)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = model = network(args)
    if not args.by_hand:
        model = DistributedDataParallel(
            net, bucket_cap_mb=args.bucket_mb, find_unused_parameters=bool(args.unused)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    folder = files() if args.load_small or args.load_large else None
    data: Dataset = Samples(args.epoch * args.batch * size, args, folder)
    batch = args.batch
    if args.longer:
        data, batch = Sequences(args.epoch * size, args.longer), 1
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch,
        sampler=sampler,
        num_workers=args.workers,
        persistent_workers=args.persistent,
    )
    nothing = argparse.Namespace(**vars(args) | {"load_sleep": 0, "load_work": 0})
    held_out = DataLoader(Samples(2 * args.batch, nothing), args.batch)
    dtype = torch.float64 if args.double else torch.float32
    matrix, small = torch.randn(256, 256, dtype=dtype), torch.zeros(1)
    room = torch.empty(args.touch if args.reuse else 0, dtype=torch.uint8)
    known = [[i] for i in range(args.collect)]
    step = micro = 0
    while step < args.steps:
        for x, y in loader:
            last = (micro + 1) % args.accumulate == 0
            if args.local:
                model.require_backward_grad_sync = last
            loss = nn.functional.mse_loss(model(x), y)
            for number in range(args.products):  # additional computation in the forward pass
                matrix[0, 0] = number  # equal products would be a fault of their own
                loss = loss + 0 * (matrix @ matrix)[0, 0]
            if args.touch:
                ones = room.fill_(1) if args.reuse else torch.ones(args.touch, dtype=torch.uint8)
                loss = loss + 0 * ones[-1]
            if rank == args.slow_rank:
                busy(args.slow)
            if micro % args.accumulate == 0:
                optimizer.zero_grad()
            loss.backward()
            micro += 1
            if micro % args.accumulate:
                continue
            if args.by_hand:
                for one in model.parameters():
                    dist.all_reduce(one.grad)
                    one.grad /= size
            for _ in range(args.reduces):
                dist.all_reduce(small)
            for _ in range(args.barriers):
                dist.barrier()
            optimizer.step()
            step += 1
            if known:
                gc.collect()
            if args.script:
                time.sleep(args.script)
            for i in range(args.prints):
                print("step", step, "line", i, flush=True)
            if step % 5 == 0 and rank == 0 and args.validate:
                validate(net, held_out, args.validate)
            if step % 5 == 0 and rank == 0 and args.save:
                torch.save(net.state_dict(), SlowFile(args.save))
            if step == args.steps:
                break
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
