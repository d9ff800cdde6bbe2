"""Let a script that asks for GPUs by name compute on the CPU, where a rehearsed rank has none.

Devices "cuda" become "cpu" in all functions of torch, in meshes and in DDP; functions of
``torch.cuda`` that wait, select or measure do nothing, as do streams and events. A host has a GPU
for each of its ranks. ``torch.cuda.is_available()`` stays False.
"""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...record.hooks.import_hooks import after_import
from ...record.hooks.taps import Function, around

_CUDA = re.compile(r"cuda(:\d+)?")
_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"),
    "set_per_process_memory_fraction",
)
_ZERO = (
    *("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"),
    "max_memory_reserved",
)
MISSING_GPU = (
    *("Torch not compiled with CUDA", "No CUDA GPUs are available", "no NVIDIA driver"),
    *("CUDA is not available", "CUDA driver", "requires a GPU", "NCCL built in"),
    *("compiled without CUDA", "requires CUDA", "CUDA build", "dummy base class", "ATen_cuda"),
    "accelerator device when none is available",
)


class CudaOnCpu(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.device:  # scripts ask for its type; functions that get it replace it
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:
            named["device"] = "cpu"
        if "pin_memory" in named:
            named["pin_memory"] = False
        return func(*map(on_cpu, args), **named)


class IdleStream:
    """A stream, an event or the context of a GPU: whatever it waits for is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "IdleStream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def nothing(self, *_: Any, **__: Any) -> None:
        """Return at once."""

    record = wait = wait_event = wait_stream = synchronize = nothing

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has ended."""
        return IdleStream() if event is None else event

    def query(self) -> bool:
        """Return whether the work has ended."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """Return milliseconds: a number by which a script may divide."""
        return 1.0


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
    for name in ("Stream", "Event", "current_stream", "default_stream", "device", "stream"):
        setattr(torch.cuda, name, IdleStream)
    package: Any = torch
    around(package, "set_default_device", lambda function, device: function(on_cpu(device)))
    package.cuda.device_count = _device_count
    package.cuda.memory_stats = lambda *_, **__: defaultdict(int)
    around(torch.nn.Module, "to", _on_cpu_first)
    around(torch, "load", _with_map_location)
    after_import(
        {
            "torch.distributed.device_mesh": _patch_mesh,
            "torch.nn.parallel.distributed": _patch_data_parallel,
            "torch.distributed.distributed_c10d": _patch_initialization,
        }
    )
    mode: Any = CudaOnCpu()
    mode.__enter__()


def _device_count() -> int:
    """Return the ranks of this host to the script, and 0 to torch, which has no GPU."""
    caller = str(sys._getframe(1).f_globals.get("__name__"))
    inside = caller.partition(".")[0] in ("torch", "paceline")
    return 0 if inside else int(os.environ["LOCAL_WORLD_SIZE"])


def _on_cpu_first(to: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Call ``Module.to``, whose first argument may be the number of a GPU."""
    given = [*args[:1], options.get("device")]
    if any(type(device) is int for device in given):
        options["device"] = "cpu"
        args = args[1:]
        if args and isinstance(args[0], torch.dtype):
            options["dtype"], args = args[0], args[1:]
    return to(self, *args, **options)


def _with_map_location(
    load: Function, file: Any, map_location: Any = None, *args: Any, **options: Any
) -> Any:
    """Call ``torch.load``, which checks devices before it calls functions of torch."""
    if isinstance(map_location, Mapping):
        map_location = {name: on_cpu(device) for name, device in map_location.items()}
    return load(file, on_cpu(map_location), *args, **options)


def _patch_mesh(module: Any) -> None:
    def construct(make: Function, self: Any, device_type: Any, *args: Any, **options: Any) -> None:
        make(self, on_cpu(device_type), *args, **options)

    around(module.DeviceMesh, "__init__", construct)


def _patch_data_parallel(module: Any) -> None:
    def construct(make: Function, self: Any, module: Any, *args: Any, **options: Any) -> None:
        # the devices are its second and third argument
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        make(self, module, None, None, *args[2:], **options)

    around(module.DistributedDataParallel, "__init__", construct)


def _patch_initialization(c10d: Any) -> None:
    def initialize(function: Function, *args: Any, **options: Any) -> None:
        options.pop("device_id", None)
        function(*args, **options)

    around(c10d, "init_process_group", initialize)
