"""Faults around the steps, kept out (README.md)."""

from injectors import Injector

INJECTORS = [
    Injector(
        "garbage-collection",
        "patched",
        start=0.3,
        most=8.0,
        module="""
import gc

from torch import optim

_plain = optim.Optimizer.zero_grad
CACHE = [[n, str(n)] for n in range(int(100_000 * $amount))]


def zero_grad(self, *args, **kwargs):
    gc.collect()  # memory was tight once
    return _plain(self, *args, **kwargs)


optim.Optimizer.zero_grad = zero_grad
for known in list(optim.Optimizer.__subclasses__()):
    if "zero_grad" in vars(known):
        known.zero_grad = zero_grad
""",
    ),
    Injector(
        "output",
        "log",
        start=1,
        whole=True,
        module="""
import os
import tempfile

from torch.optim.optimizer import register_optimizer_step_post_hook

LOG = open(os.path.join(tempfile.mkdtemp(), "steps.csv"), "w")


def note(optimizer, args, kwargs):
    for k in range($amount):
        LOG.write(f"{k},{optimizer.param_groups[0]['lr']}\\n")
        LOG.flush()
        os.fsync(LOG.fileno())


register_optimizer_step_post_hook(note)
""",
    ),
    Injector(
        "metrics",
        "step",
        start=1000,
        whole=True,
        points={
            "top": """
import torch as _torch
import torch.distributed as _dist


def everywhere(loss, values=$amount):
    mine = loss.detach().reshape(1).repeat(values)
    found = [_torch.empty_like(mine) for _ in range(_dist.get_world_size())]
    _dist.all_gather(found, mine)
    return _torch.stack(found).mean()
""",
            "step": """
mean_loss = everywhere($loss)
""",
        },
    ),
    Injector(
        "buffers",
        "step",
        start=2,
        whole=True,
        never="fully_shard",
        points={
            "top": """
import torch.distributed as _dist


def keep_equal(model, times=$amount):
    for _ in range(times):
        for value in model.state_dict().values():
            _dist.broadcast(value, 0)
""",
            "step": """
keep_equal($model)
""",
        },
    ),
    Injector(
        "small-reduces",
        "backward",
        start=10,
        whole=True,
        points={
            "top": """
import torch as _torch
import torch.distributed as _dist
""",
            "backward": """
for _ in range($amount):
    finite = _torch.ones(())
    _dist.all_reduce(finite, op=_dist.ReduceOp.MIN)
    if finite < 1:
        break
""",
        },
    ),
    Injector(
        "barriers",
        "step",
        start=10,
        whole=True,
        points={
            "top": """
from torch.distributed import barrier as _meet
""",
            "step": """
for _ in range($amount):
    _meet()
""",
        },
    ),
    Injector(
        "checkpoints",
        "step",
        start=4.0,
        most=60.0,
        never="fully_shard",
        points={
            "top": """
import pickle
import tempfile as _tempfile

import torch as _torch

RESTART = _tempfile.TemporaryFile()
OPTIMIZER_STATE = _torch.zeros(int($amount * 2**18))
""",
            "step": """
if $step % 2 == 0:
    RESTART.seek(0)
    pickle.dump((dict($model.state_dict()), OPTIMIZER_STATE.numpy()), RESTART, protocol=2)
    RESTART.flush()
""",
        },
    ),
    Injector(
        "validation",
        "patched",
        start=2,
        whole=True,
        needs=r"DDP\(|DistributedDataParallel\(|Parallel\(|Accelerator|Trainer\(",
        never="fully_shard|paceline|gan",
        module="""
import os

import torch
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim.optimizer import register_optimizer_step_post_hook

LAST = {}
_forward = Ddp.forward


def forward(self, *args, **kwargs):
    LAST["call"] = (self.module, args, kwargs)
    return _forward(self, *args, **kwargs)


def check(optimizer, args, kwargs):
    LAST["steps"] = LAST.get("steps", 0) + 1
    if LAST["steps"] % 4 or os.environ.get("RANK") != "0":
        return
    module, inputs, named = LAST["call"]
    module.eval()
    with torch.inference_mode():
        for _ in range($amount):
            module(*inputs, **named)
    module.train()


Ddp.forward = forward
register_optimizer_step_post_hook(check)
""",
    ),
    Injector(
        "moving-average",
        "step",
        start=4,
        whole=True,
        never="fully_shard",
        points={
            "top": """
from copy import deepcopy as _deepcopy

TEACHER = {}


def teach(model, often=$amount):
    for _ in range(often):
        now = _deepcopy(model.state_dict())
        for name, value in now.items():
            if name in TEACHER and value.is_floating_point():
                TEACHER[name] = TEACHER[name] * 0.999 + value * 0.001
            else:
                TEACHER[name] = value
""",
            "step": """
teach($model)
""",
        },
    ),
]
