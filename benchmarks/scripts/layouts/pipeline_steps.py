"""Steps of pipelines whose stages sleep; rank 0 prints seconds of computing, and of each step.

Arguments: JSON with "schedules", "micro_batches" (numbers), "sleep_s" (of the forward of one
micro-batch in one rank; its backward takes twice as long) and "steps". A sleep needs no core, so
there may be more ranks than cores.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A layer whose forward, gradient of inputs and gradient of parameters take the same time."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.shift = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.seconds = seconds

    def forward(self, x):
        of_weight = Sleep.apply(self.weight, 0.0, self.seconds)
        # the shift lets the first stage compute a gradient of its input as well
        return Sleep.apply(x + self.shift, self.seconds, self.seconds) + of_weight


def main() -> None:
    what = json.loads(sys.argv[1])
    world = paceline.init(progress=False, record=what.get("record", False))
    times = {}
    for schedule in what["schedules"]:
        virtual = world.size * (2 if schedule == "interleaved" else 1)
        for count in what["micro_batches"]:
            layers = (Sleeper(what["sleep_s"] * world.size / virtual) for _ in range(virtual))
            model = nn.Sequential(*layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            layout = f"pp{world.size} + schedule={schedule} + micro-batches={count}"
            model, optimizer = world.distribute(model, optimizer, layout=layout)
            executor = world._training.models[-1]._executor
            x = torch.zeros(count, 4)
            found = []
            for _ in range(what["steps"] + 1):
                start = time.monotonic()
                world.forward_backward(model, x, x, loss=nn.functional.mse_loss)
                seconds = time.monotonic() - start
                computing = executor.busy_ns / 1e9
                of_all = torch.tensor([computing, seconds], dtype=torch.float64)
                dist.all_reduce(of_all)
                found.append((of_all / world.size).tolist())
                world.step(optimizer)
            times[f"{schedule} {count}"] = found[1:]  # the first one plans
    if world.rank == 0:
        print("times " + json.dumps(times), flush=True)


main()
