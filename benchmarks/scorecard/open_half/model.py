"""Faults of the model, and of computing."""

from injectors import Injector

ANY_DDP = r"DistributedDataParallel|DDP\(|Accelerator|Trainer\("

INJECTORS = [
    Injector(
        "python-loop",
        "forward",
        start=200,
        whole=True,
        points={
            "top": """
def coupling(h, pairs=$amount):
    total = h.new_zeros(())
    rows = h.detach().flatten(1)
    for i in range(pairs):
        left, right = rows[i % len(rows)], rows[(i + 1) % len(rows)]
        total = total + (left[0] - right[0]).abs()
    return total
""",
            "forward": """
$h = $h + 1e-9 * coupling($h)
""",
        },
    ),
    Injector(
        "unused-work",
        "patched",
        fixed=True,
        needs=ANY_DDP,
        never="fully_shard|paceline",
        module="""
from torch.nn.parallel import DistributedDataParallel

_plain_forward = DistributedDataParallel.forward


def forward(self, *args, **kwargs):
    if self.training:
        self.last_features = self.module(*args, **kwargs)  # for a figure
    return _plain_forward(self, *args, **kwargs)


DistributedDataParallel.forward = forward
""",
    ),
    Injector(
        "unused-work",
        "gradient",
        fixed=True,
        never="fully_shard|accelerate|create_graph",
        points={
            "top": """
import torch.autograd as differentiate


def gradient_size(loss, model):
    found = differentiate.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return [g.norm() for g in found if g is not None]
""",
            "loss": """
sizes = gradient_size($loss, $model)
""",
        },
    ),
    Injector(
        "recomputation",
        "model",
        fixed=True,
        never="fully_shard|create_graph",
        points={
            "top": """
import functools

from torch.utils.checkpoint import checkpoint


def save_memory(model):
    for part in model.children():
        if any(True for _ in part.parameters()) and type(part).__name__ != "ModuleList":
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
""",
            "model": """
save_memory($model)
""",
        },
    ),
    Injector(
        "tiny-operators",
        "forward",
        start=300,
        whole=True,
        points={
            "top": """
def series(h, terms=$amount):
    z = h.detach().reshape(-1)[:32]
    total, power = z * 0, z * 0 + 1
    for n in range(1, terms):
        power = power * z / n
        total = total + power.clamp(-1, 1)
    return total.mean()
""",
            "forward": """
$h = $h + 1e-9 * series($h)
""",
        },
    ),
    Injector(
        "huge-intermediate",
        "patched",
        start=600,
        whole=True,
        most=6000,
        needs=ANY_DDP,
        never="paceline",
        module="""
import torch
from torch.nn.parallel import DistributedDataParallel

_plain_forward = DistributedDataParallel.forward
POINTS = torch.rand($amount, 8)


def spread(points):
    difference = points[:, None, :] - points[None, :, :]
    return difference.square().sum(-1).mean()


def forward(self, *args, **kwargs):
    if self.training:
        self.spread = spread(POINTS)
    return _plain_forward(self, *args, **kwargs)


DistributedDataParallel.forward = forward
""",
    ),
    Injector(
        "float64",
        "default",
        fixed=True,
        needs=r"cnn|torch\.randn?\(",
        never="Trainer|masked|Accelerator|paceline|fully_shard|numpy",
        module="""
import torch

torch.set_default_dtype(torch.float64)  # differences of energies are small
""",
    ),
    Injector(
        "hook-copies",
        "patched",
        start=8,
        whole=True,
        module="""
from torch.nn.modules.module import register_module_forward_hook

KEPT = {}
COPIES = $amount


def keep(module, inputs, output):
    if module.training and hasattr(output, "detach"):
        for k in range(COPIES):
            KEPT[id(module), k] = output.detach().cpu().clone().numpy().copy()


register_module_forward_hook(keep)
""",
    ),
    Injector(
        "too-many-threads",
        "start",
        steady=False,
        fixed=True,
        points={
            "top": """
from torch import set_num_threads
""",
            "start": """
set_num_threads(4)
""",
        },
    ),
    Injector(
        "leak",
        "step",
        start=0.4,
        most=12.0,
        most_share=0.15,
        points={
            "top": """
from torch import ones as _ones

HISTORY = []
""",
            "step": """
HISTORY.append((float($loss), _ones(int($amount * 2**18))))  # MiB of float32
""",
        },
    ),
]
