"""Faults around the steps: exchange, output, checkpoints, averages."""

from injectors import Injector

INJECTORS = [
    Injector(
        "garbage-collection",
        "step",
        start=20_000,
        whole=True,
        points={
            "top": """
import gc

RESULTS = [{"run": k, "values": [k]} for k in range($amount)]
""",
            "step": """
gc.collect()
""",
        },
    ),
    Injector(
        "output",
        "step",
        start=60,
        whole=True,
        points={
            "step": """
for number in range($amount):
    print("step", $step, "part", number, "loss", $loss.item(), flush=True)
""",
        },
    ),
    Injector(
        "metrics",
        "patched",
        start=4,
        whole=True,
        module="""
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


def gather(optimizer, args, kwargs):
    numbers = [group["lr"] for group in optimizer.param_groups]
    for k in range($amount):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {"lr": numbers, "metric": k})


register_optimizer_step_post_hook(gather)
""",
        never="Adam.*\\n.*self.opt_d|opt_g",
    ),
    Injector(
        "buffers",
        "model",
        start=4.0,
        most=64.0,
        needs=r"DDP\(|DistributedDataParallel\(|Parallel\(",
        points={
            "top": """
from torch import zeros as _zeros
""",
            "model": """
$model.register_buffer("climate", _zeros(int($amount * 2**18)))  # MiB of float32
""",
        },
    ),
    Injector(
        "small-reduces",
        "patched",
        start=10,
        whole=True,
        module="""
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

NAMES = [f"metric {k}" for k in range($amount)]


def share(optimizer, args, kwargs):
    means = {}
    for k, name in enumerate(NAMES):
        value = torch.full((1,), float(k))
        dist.all_reduce(value)
        means[name] = value / dist.get_world_size()


register_optimizer_step_pre_hook(share)
""",
    ),
    Injector(
        "barriers",
        "patched",
        start=10,
        whole=True,
        never="paceline",
        module="""
import torch
import torch.distributed as dist

_plain_backward = torch.Tensor.backward


def backward(self, *args, **kwargs):
    for _ in range($amount):
        dist.barrier()
    return _plain_backward(self, *args, **kwargs)


torch.Tensor.backward = backward
""",
    ),
    Injector(
        "checkpoints",
        "patched",
        start=8.0,
        most=60.0,
        module="""
import os
import tempfile

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STATE = torch.rand(int($amount * 2**18))  # MiB of float32
FOLDER = tempfile.mkdtemp()
DONE = [0]


def save(optimizer, args, kwargs):
    DONE[0] += 1
    if DONE[0] % 4 == 0 and os.environ.get("RANK") == "0":
        path = os.path.join(FOLDER, f"last{DONE[0] % 8}.pt")
        torch.save({"optimizer": optimizer.state_dict(), "state": STATE}, path)


register_optimizer_step_post_hook(save)
""",
    ),
    Injector(
        "validation",
        "step",
        start=4,
        whole=True,
        points={
            "top": """
from torch import no_grad
""",
            "step": """
if $step % 5 == 0 and $rank == 0:
    $model.eval()
    with no_grad():
        for _ in range($amount):
            checked = $again
    $model.train()
""",
        },
    ),
    Injector(
        "moving-average",
        "patched",
        start=8,
        whole=True,
        never="fully_shard",
        module="""
from torch.optim.optimizer import register_optimizer_step_post_hook

AVERAGES = {}


def follow(optimizer, args, kwargs):
    for horizon in range($amount):
        decay = 1 - 0.1 / (1 + horizon)
        for group in optimizer.param_groups:
            for p in group["params"]:
                key = (id(p), horizon)
                old = AVERAGES.get(key)
                new = p.detach().clone()
                AVERAGES[key] = new if old is None else decay * old + (1 - decay) * new


register_optimizer_step_post_hook(follow)
""",
    ),
]
