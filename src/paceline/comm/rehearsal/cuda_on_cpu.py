"""Let a script that asks for GPUs by name compute on the CPU, where a rehearsed rank has none.

Devices "cuda" become "cpu" in all functions of torch, in meshes and in DDP; functions of
``torch.cuda`` that wait, select or count do nothing. ``torch.cuda.is_available()`` stays False.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...record.hooks.import_hooks import after_import

_CUDA = re.compile(r"cuda(:\d+)?")
_NOTHING = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
_ZERO = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved")
MISSING_GPU = (
    *("Torch not compiled with CUDA", "No CUDA GPUs are available", "no NVIDIA driver"),
    *("CUDA is not available", "CUDA driver", "requires a GPU", "NCCL built in"),
)


class CudaOnCpu(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(on_cpu, args), **named)


def on_cpu(device: Any) -> Any:
    """Return the CPU for a GPU; any other value as it is."""
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    if isinstance(device, str) and _CUDA.fullmatch(device):
        return "cpu"
    return device


def install() -> None:
    """Replace GPUs by the CPU in this process, for the rest of its life."""
    for name in _NOTHING:
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in _ZERO:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    after_import(
        {
            "torch.distributed.device_mesh": _patch_mesh,
            "torch.nn.parallel.distributed": _patch_data_parallel,
            "torch.distributed.distributed_c10d": _patch_initialization,
        }
    )
    mode: Any = CudaOnCpu()
    mode.__enter__()


def _patch_mesh(module: Any) -> None:
    original = module.DeviceMesh.__init__

    @functools.wraps(original)
    def construct(self: Any, device_type: Any, *args: Any, **options: Any) -> None:
        original(self, on_cpu(device_type), *args, **options)

    module.DeviceMesh.__init__ = construct


def _patch_data_parallel(module: Any) -> None:
    original = module.DistributedDataParallel.__init__

    @functools.wraps(original)
    def construct(self: Any, module: Any, *args: Any, **options: Any) -> None:
        # the devices are its second and third argument
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        original(self, module, None, None, *args[2:], **options)

    module.DistributedDataParallel.__init__ = construct


def _patch_initialization(c10d: Any) -> None:
    original: Callable[..., None] = c10d.init_process_group

    @functools.wraps(original)
    def initialize(*args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        original(*args, **options)

    package: Any = torch.distributed
    c10d.init_process_group = package.init_process_group = initialize
