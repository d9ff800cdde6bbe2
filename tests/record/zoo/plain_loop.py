"""A plain DDP loop with knobs that make known trouble."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate


class Again(torch.autograd.Function):
    """Do the two matrix products of a layer's backward, and the one of its forward, again."""

    @staticmethod
    def forward(ctx, y, x, weight, times):
        ctx.save_for_backward(x, weight)
        ctx.times = times
        repeat(times, lambda part: part @ weight.t(), x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        repeat(ctx.times, lambda part: part @ weight, grad)
        repeat(ctx.times, lambda part: part.t() @ x[: len(part)], grad)
        return grad, None, None, None


def repeat(times, product, rows):
    for _ in range(int(times)):
        product(rows)
    if part := round((times - int(times)) * len(rows)):
        product(rows[:part])


class Layer(nn.Linear):
    again = 0.0  # how often its products are done again

    def forward(self, x):
        y = super().forward(x)
        if self.again:
            y = Again.apply(y, x.detach(), self.weight.detach(), self.again)
        return F.relu(y)


class SlowFile:
    """Takes `seconds` for `size` bytes, and keeps none."""

    def __init__(self, seconds, size):
        self.rate, self.written, self.began = size / seconds, 0, time.perf_counter()

    def write(self, data):
        self.written += memoryview(data).nbytes
        late = self.began + self.written / self.rate - time.perf_counter()
        time.sleep(max(0.0, late))
        return memoryview(data).nbytes

    def flush(self):
        pass


def validate(net, loader, seconds):
    began = time.perf_counter()
    net.eval()
    with torch.no_grad():
        while time.perf_counter() - began < seconds:
            for x, y in loader:
                F.mse_loss(net(x), y)
                if time.perf_counter() - began >= seconds:
                    break
    net.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4, help="hidden layers")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--factor", type=float, default=1.0, help="of the slow rank's compute")
    parser.add_argument("--input-sleep", type=float, default=0.0, help="seconds for each batch")
    parser.add_argument("--input-rank", type=int, default=-1, help="this rank sleeps alone")
    parser.add_argument("--validate-rank0", type=float, default=0.0, help="seconds, each 10 steps")
    parser.add_argument("--save-rank0", type=float, default=0.0, help="seconds, each 10 steps")
    parser.add_argument("--other", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(
        *[nn.Linear(64, 512), *(Layer(512, 512) for _ in range(args.depth)), nn.Linear(512, 1)]
    )
    if rank == args.slow_rank:
        Layer.again = args.factor - 1
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def collate(samples):
        if args.input_sleep and args.input_rank in (-1, rank):
            time.sleep(args.input_sleep)
        return default_collate(samples)

    x = torch.randn(10 * args.batch * world, 64)
    data = TensorDataset(x, x[:, :4].sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, collate_fn=collate)
    held_out = DataLoader(data, batch_size=args.batch)

    step, epoch = 0, 0
    began = time.perf_counter()
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if args.other:
                time.sleep(args.other)
            if step % 10 == 0 and rank == 0 and args.validate_rank0:
                validate(net, held_out, args.validate_rank0)
            if step % 10 == 0 and rank == 0 and args.save_rank0:
                size = sum(p.nbytes for p in net.parameters())
                torch.save(net.state_dict(), SlowFile(args.save_rank0, size))
            if step == args.steps:
                break
    seconds = time.perf_counter() - began
    if rank == 0:
        print(f"final loss {loss.item():.4f}, {seconds:.3f} s for {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
