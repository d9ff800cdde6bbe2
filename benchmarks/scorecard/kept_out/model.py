"""Faults of the model, and of computing, kept out (README.md)."""

from injectors import Injector

INJECTORS = [
    Injector(
        "python-loop",
        "patched",
        start=400,
        whole=True,
        module="""
import math

from torch import nn

_plain_call = nn.Module.__call__


def histogram(values):
    bins = [0] * 16
    for value in values:
        bins[int(8 + 7 * math.tanh(value))] += 1
    return bins


def call(self, *args, **kwargs):
    output = _plain_call(self, *args, **kwargs)
    if isinstance(self, (nn.Linear, nn.Conv1d, nn.Conv2d)) and self.training:
        self.seen = histogram(output.detach().flatten()[:$amount].tolist())
    return output


nn.Module.__call__ = call
""",
    ),
    Injector(
        "unused-work",
        "forward",
        fixed=True,
        points={
            "loss": """
untrained = $again.sum() * 0.5
""",
        },
    ),
    Injector(
        "recomputation",
        "patched",
        fixed=True,
        needs=r"DDP\(|DistributedDataParallel\(|Parallel\(|Accelerator|Trainer\(",
        never="fully_shard|paceline|gan|no_sync",
        module="""
import torch.nn.parallel.distributed as parallel
from torch.utils.checkpoint import checkpoint

_run = parallel.DistributedDataParallel._run_ddp_forward


def run(self, *args, **kwargs):
    plain = self.module.forward
    if not self.training:
        return _run(self, *args, **kwargs)
    self.module.forward = lambda *a, **k: checkpoint(plain, *a, use_reentrant=False, **k)
    try:
        return _run(self, *args, **kwargs)
    finally:
        del self.module.forward


parallel.DistributedDataParallel._run_ddp_forward = run
""",
    ),
    Injector(
        "tiny-operators",
        "patched",
        start=8,
        whole=True,
        never="fully_shard",
        module="""
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def clip_rows(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.dim() > 1:
                for row in p.grad[: 2 * $amount]:
                    row.mul_(torch.clamp(10.0 / (row.norm() + 1e-6), max=1.0))


register_optimizer_step_pre_hook(clip_rows)
""",
    ),
    Injector(
        "huge-intermediate",
        "loss",
        start=64,
        whole=True,
        most=900,
        never="fully_shard|input_ids",
        points={
            "top": """
import torch as _torch


def contrast(x, size=$amount):
    flat = x.detach().float().reshape(-1)[: 4 * size].repeat(4)[: 4 * size]
    cube = flat.view(-1, 1, 1) * flat.view(1, -1, 1)[:, :size] * _torch.ones(32)
    return cube.tanh().mean()
""",
            "loss": """
spread = contrast($x)
""",
        },
    ),
    Injector(
        "float64",
        "model",
        fixed=True,
        never="fully_shard|Trainer|input_ids|create_graph",
        points={
            "top": """
import torch as _torch


def _double(module, inputs):
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def precise(module):
    if all(isinstance(x, _torch.Tensor) for x in module.parameters()):
        module.double().register_forward_pre_hook(_double)
        module.register_forward_hook(lambda module, inputs, output: output.float())
""",
            "model": """
precise($model)
""",
        },
        needs="cnn|ResNet|UNet|Surrogate|AutoEncoder|mlp|Classifier|Forecaster|Jastrow|Middle|Event",
    ),
    Injector(
        "hook-copies",
        "model",
        start=20000,
        whole=True,
        points={
            "top": """
import numpy as _np

ACTIVITY = {}


def watch(module, inputs, output, values=$amount):
    if module.training and hasattr(output, "detach"):
        seen = output.detach().reshape(-1)[:values].numpy().astype("float64")
        ACTIVITY[id(module)] = _np.histogram(seen, bins=20)
""",
            "model": """
for watched in $model.modules():
    watched.register_forward_hook(watch)
""",
        },
    ),
    Injector(
        "too-many-threads",
        "environment",
        steady=False,
        fixed=True,
        own_threads=True,
        environment={"OMP_NUM_THREADS": "4"},
    ),
    Injector(
        "leak",
        "patched",
        start=0.4,
        most=12.0,
        most_share=0.15,
        module="""
import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook

KEPT = []


def keep(optimizer, args, kwargs):
    KEPT.append(np.full(int($amount * 2**17), len(KEPT), np.float64))


register_optimizer_step_post_hook(keep)
""",
    ),
]
