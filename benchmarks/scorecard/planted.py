"""A plain DDP script in which something can be made slow. Nothing in it knows of Paceline."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def busy(seconds: float) -> None:
    """Keep a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Samples(Dataset):
    """sleep, work: seconds that a sample takes waiting, and computing."""

    def __init__(self, count: int, sleep: float, work: float) -> None:
        self.count, self.sleep, self.work = count, sleep, work
        self.x = torch.randn(64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sleep:
            time.sleep(self.sleep)
        if self.work:
            busy(self.work)
        return self.x, self.x[:1]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--products", type=int, default=0, help="computed beside the layers")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--load-sleep", type=float, default=0.0, help="s a batch")
    parser.add_argument("--load-work", type=float, default=0.0, help="s a batch")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", type=float, default=0.0, help="s a step that it computes longer")
    parser.add_argument("--reduces", type=int, default=0, help="small all-reduces a step")
    parser.add_argument("--validate", type=float, default=0.0, help="s on rank 0, each 5 steps")
    parser.add_argument("--save", type=float, default=0.0, help="s on rank 0, each 5 steps")
    parser.add_argument("--script", type=float, default=0.0, help="s a step, outside of all else")
    return parser.parse_args()


class SlowFile:
    """Takes its time for what is written to it."""

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


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    each = 1 / args.batch
    data = Samples(200 * args.batch, args.load_sleep * each, args.load_work * each)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers)
    held_out = DataLoader(Samples(2 * args.batch, 0.0, 0.0), args.batch)
    matrix, small = torch.randn(256, 256), torch.zeros(1)
    step = 0
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            for _ in range(args.products):  # part of the forward, of no use
                loss = loss + 0 * (matrix @ matrix)[0, 0]
            if rank == args.slow_rank:
                busy(args.slow)
            optimizer.zero_grad()
            loss.backward()
            for _ in range(args.reduces):
                dist.all_reduce(small)
            optimizer.step()
            step += 1
            if args.script:
                time.sleep(args.script)
            if step % 5 == 0 and rank == 0 and args.validate:
                validate(net, held_out, args.validate)
            if step % 5 == 0 and rank == 0 and args.save:
                torch.save(net.state_dict(), SlowFile(args.save))
            if step == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
