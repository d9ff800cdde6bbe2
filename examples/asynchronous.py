"""Synchronous and asynchronous training of one model on handwritten digits, for comparison.

    paceline run -n 4 examples/asynchronous.py                            # synchronous, 4 workers
    paceline run -n 5 examples/asynchronous.py --mode async               # 4 workers and a server
    paceline run -n 5 examples/asynchronous.py --mode async --staleness 4

--mode async is a parameter server (Downpour of DistBelief, Dean et al. 2012): rank 0 has the
parameters. Each worker gets them, computes a gradient and sends it; the server updates without
waiting for the others. With --staleness N a worker waits as soon as it is more than N steps ahead
of the slowest one (stale synchronous parallel, Ho et al. 2013).

Each step of a worker sleeps --step-ms, which stands for a device that computes; --slow is the
factor for the last worker. docs/explanation/synchronous-training.md shows what came of it.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from digits import build_model, load_data
from torch import nn
from torch.nn.functional import cross_entropy


class Judge:
    """Test accuracy during a training, and whether the training ends."""

    def __init__(self, model, test, args):
        self.model, self.args = model, args
        self.images, self.labels = test.tensors
        self.begin, self.next = time.perf_counter(), args.every
        self.curve = []  # (seconds, samples, accuracy)

    def is_done(self, samples):
        if samples < self.next:
            return False
        self.next += self.args.every
        with torch.no_grad():
            right = self.model(self.images).argmax(1) == self.labels
        accuracy = float(right.float().mean())
        self.curve.append((time.perf_counter() - self.begin, samples, accuracy))
        return accuracy >= self.args.target or samples >= self.args.samples


class Worker:
    """Batches of one worker, and how long its device takes for a step."""

    def __init__(self, model, train, number, count, args):
        self.model, self.args = model, args
        self.images, self.labels = (tensor[number::count] for tensor in train.tensors)
        self.order = torch.Generator().manual_seed(args.seed * count + number)
        is_slow = number == count - 1
        self.step_s = args.step_ms / 1000 * (args.slow if is_slow else 1)

    def backward(self):
        rows = torch.randint(len(self.images), (self.args.batch,), generator=self.order)
        cross_entropy(self.model(self.images[rows]), self.labels[rows]).backward()
        time.sleep(self.step_s)


def synchronous(model, optimizer, worker, judge, batch):
    """All workers exchange their gradients in each step."""
    parallel = nn.parallel.DistributedDataParallel(model)
    worker.model, samples = parallel, 0
    is_done = torch.zeros(())
    while not is_done:
        while samples < judge.next:
            optimizer.zero_grad()
            worker.backward()
            optimizer.step()
            samples += batch
        if dist.get_rank() == 0:
            is_done.fill_(judge.is_done(samples))
        else:
            judge.next += judge.args.every
        dist.broadcast(is_done, 0)
    return samples // batch, []


def serve(model, optimizer, judge, args):
    """Update the parameters with each gradient that arrives, until all workers have ended."""
    parameters = list(model.parameters())
    clocks = dict.fromkeys(range(1, dist.get_world_size()), 0)
    message = torch.empty(1 + count(parameters))
    updates, ages, waiting, done = 0, [], list(clocks), False
    while clocks:
        slowest = min(clocks.values())
        for worker in list(waiting):
            if done or args.staleness is None or clocks[worker] - slowest <= args.staleness:
                state = nn.utils.parameters_to_vector(parameters).detach()
                head = torch.tensor([float(done), float(updates)])
                dist.send(torch.cat([head, state]), worker)
                waiting.remove(worker)
                if done:
                    del clocks[worker]
        if clocks:
            worker = dist.recv(message)  # from the first one that sends
            ages.append(updates - int(message[0]))
            put_gradients(parameters, message[1:])
            optimizer.step()
            updates += 1
            clocks[worker] += 1
            waiting.append(worker)
            done = done or judge.is_done(updates * args.batch)
    return updates, ages


def work(model, worker):
    """Compute gradients with the server's parameters, until it ends the training."""
    parameters = list(model.parameters())
    message = torch.empty(2 + count(parameters))
    while True:
        dist.recv(message, 0)
        if message[0]:
            return
        nn.utils.vector_to_parameters(message[2:], parameters)
        model.zero_grad()
        worker.backward()
        gradients = [parameter.grad.flatten() for parameter in parameters]
        dist.send(torch.cat([message[1:2], *gradients]), 0)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def put_gradients(parameters, vector):
    parts = vector.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--staleness", type=int, help="steps ahead of the slowest worker, async")
    parser.add_argument("--batch", type=int, default=16, help="of a worker, default 16")
    parser.add_argument("--lr", type=float, default=0.1, help="default 0.1")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy, default 0.97")
    parser.add_argument("--samples", type=int, default=40_000, help="at most, default 40,000")
    parser.add_argument("--every", type=int, default=640, help="samples between evaluations")
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep in each step")
    parser.add_argument("--slow", type=float, default=1.0, help="factor for the last worker")
    args = parser.parse_args()
    least = 2 if args.mode == "async" else 1
    if int(os.environ.get("WORLD_SIZE", "0")) < least:
        sys.exit(
            f"--mode {args.mode} needs a launcher and at least {least} ranks. HINT: paceline run "
            f"-n 5 examples/asynchronous.py --mode {args.mode}"
        )
    if args.staleness is not None and (args.staleness < 0 or args.mode == "sync"):
        sys.exit("--staleness is 0 or more, with --mode async. HINT: --mode async --staleness 4")

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # every rank has the same parameters
    model, (train, test) = build_model(), load_data()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    rank, workers = dist.get_rank(), dist.get_world_size()
    number = rank
    if args.mode == "async":
        number, workers = rank - 1, workers - 1
    dist.barrier()
    judge = Judge(model, test, args)
    worker = Worker(model, train, number, workers, args)
    if args.mode == "sync":
        updates, ages = synchronous(model, optimizer, worker, judge, args.batch * workers)
    elif rank == 0:
        updates, ages = serve(model, optimizer, judge, args)
    else:
        work(model, worker)
    if rank == 0:
        seconds, samples, accuracy = judge.curve[-1]
        age = sum(ages) / len(ages) if ages else 0.0
        found = {"reached": accuracy >= args.target, "updates": updates, "mean_age": age}
        found |= {"seconds": seconds, "samples": samples, "curve": judge.curve}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
