"""Knobs of computation: autocast, precision of products, torch.compile, channels-last format."""

import getpass
import os
import stat
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..record.hooks import taps
from ..record.hooks.import_hooks import after_import
from ..security.folders import can_be_renamed_by_others, writable_by_others
from ..security.processes import find_program
from .ddp import made
from .knob import KnobResult


def autocast(_: bool, turned: KnobResult) -> None:
    """Run the forward of DDP's replicas under torch.autocast with bfloat16.

    torch.autocast uses bfloat16 only for operators where it is numerically safe. Outputs of dtype
    bfloat16 are converted to float32.
    """

    def cast(forward: taps.Function, replica: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        device = replica.device_type
        if why := _not_cast(replica, device):
            turned.not_done(why)
            return forward(replica, *args, **kwargs)
        with torch.autocast(device, torch.bfloat16):
            outputs = forward(replica, *args, **kwargs)
        turned.done()
        return tree_map(_as_float32, outputs)

    taps.REPLICA_FORWARD.around(cast)


def _as_float32(leaf: Any) -> Any:
    import torch

    is_narrow = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16
    return leaf.float() if is_narrow else leaf


def _not_cast(replica: Any, device: str) -> str:
    import torch

    if torch.is_autocast_enabled(device):
        return "the script uses autocast"
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in replica.parameters()}
    return "" if "float32" in kinds else f"its parameters are {', '.join(sorted(kinds))}"


def products(precision: str, turned: KnobResult) -> None:
    """Set the internal precision of float32 matrix products; ignore the script's own setting."""

    def install(torch: Any) -> None:
        # before the script runs: is_available() would initialize the driver
        if not torch.cuda.device_count() and not _short_products(precision):
            turned.not_done(f"this CPU has no matrix products of {precision!r} precision")
            return
        torch.set_float32_matmul_precision(precision)
        turned.done()
        turned.passes_over(torch, "set_float32_matmul_precision")

    after_import({"torch": install})


def _short_products(precision: str) -> bool:
    """Return whether the CPU supports matrix products of this precision.

    "medium" uses bfloat16, and "high" TF32 in oneDNN.
    """
    needs = {"medium": ("avx512_bf16", "amx_bf16"), "high": ("amx_fp16",)}[precision]
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return any(flag in flags for flag in needs)


def compiled(_: bool, turned: KnobResult) -> None:
    """Compile in place the model that DDP wraps.

    The compiled backward remains split at the boundaries of DDP's buckets.
    """

    def compile_inside(replica: Any) -> None:
        own = replica.module._compiled_call_impl is not None
        if own or hasattr(replica.module, "_orig_mod"):
            turned.not_done("the script compiles its model")
        elif why := _no_compiler(replica.device_type) or _no_cache():
            turned.not_done(why)
        else:
            replica.module.compile()
            turned.done()

    made(compile_inside)


def _no_compiler(device: str) -> str:
    if device != "cpu":
        if find_spec("triton"):
            return ""
        return "torch.compile needs triton for this device. HINT: pip install triton"
    if any(map(find_program, (os.environ.get("CXX") or "g++", "clang++"))):
        return ""
    return "torch.compile needs a C++ compiler. HINT: load a module, or apt install g++"


def _no_cache() -> str:
    """Return why PyTorch may not use its default cache of compiled code; "" if it may.

    PyTorch loads code from this folder, whose name in the temporary folder is known, whoever has
    created it.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return ""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the system has no name for this user
        user = f"uid_{os.getuid()}"
    folder = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    with suppress(OSError):
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        status = folder.lstat()
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if own and not writable_by_others(status) and not can_be_renamed_by_others(folder.parent):
            return ""
    return (
        f"other users can write to PyTorch's cache {folder}. HINT: "
        "TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/torchinductor"
    )


CONVOLUTIONS = ("Conv2d", "ConvTranspose2d")


def channels_last(_: bool, turned: KnobResult) -> None:
    """Run 2D convolutions in the channels-last memory format.

    Weights are converted before DDP wraps the model; without DDP, after the first optimizer step.
    Inputs of shape (N, C, H, W) are converted in each call.
    """

    def images(layer: Any, inputs: Any) -> Any:
        import torch

        first = inputs[0] if inputs else None
        if isinstance(first, torch.Tensor) and first.dim() == 4:
            return (first.contiguous(memory_format=torch.channels_last), *inputs[1:])
        return inputs

    def laid_out(layer: Any) -> None:
        import torch

        from ..record.hooks.phases import UncopiedHook

        if type(layer).__name__ not in CONVOLUTIONS or "_paceline_layout" in layer.__dict__:
            return
        layer.__dict__["_paceline_layout"] = True
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        layer.register_forward_pre_hook(UncopiedHook(images), prepend=True)
        turned.done()

    def wraps(_: Any, module: Any, *__: Any, **___: Any) -> None:
        for layer in module.modules():
            laid_out(layer)

    def after_first_step(module: Any) -> None:
        """Convert the layers of a script without DDP after its first step, when all were called."""
        called: list[Any] = []

        def look(layer: Any, _: Any) -> None:
            if type(layer).__name__ in CONVOLUTIONS:
                called.append(layer)

        looking = module.register_module_forward_pre_hook(look)

        def stepped(*_: Any) -> None:
            looking.remove()  # does nothing after the first time
            for layer in called:
                laid_out(layer)
            called.clear()

        taps.on_step(after=stepped)

    taps.REPLICA.before(wraps)
    taps.on_import("torch.nn.modules.module", after_first_step)
