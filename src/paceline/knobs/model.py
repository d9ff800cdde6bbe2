"""Knobs of the model that DistributedDataParallel wraps.

They change its computation (autocast, precision of products, torch.compile, memory format), the
constructor of the wrapper, its communication hook, and which backwards synchronize gradients.
"""

import getpass
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cluster.topology.topology import cpu_flags
from ..record.hooks import taps
from ..record.hooks.import_hooks import after_import
from ..record.ring.launcher_messages import notify
from ..security.folders import can_be_renamed_by_others, writable_by_others
from ..security.processes import find_program
from .knob import KnobResult

# Computation


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
    needs = {"medium": {"avx512_bf16", "amx_bf16"}, "high": {"amx_fp16"}}[precision]
    return bool(cpu_flags() & needs)


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

        stop_looking = module.register_module_forward_pre_hook(look).remove

        def stepped(*_: Any) -> None:
            stop_looking()  # does nothing after the first time
            for layer in called:
                laid_out(layer)
            called.clear()

        taps.on_step(after=stepped)

    taps.REPLICA.before(wraps)
    taps.on_import("torch.nn.modules.module", after_first_step)


# DistributedDataParallel


def construct(option: str, value: Any, turned: KnobResult) -> None:
    """Construct all replicas with an option."""
    made(lambda _: turned.done(), **{option: value})


def no_search(_: bool, turned: KnobResult) -> None:
    """Construct all replicas without a search for unused parameters."""
    construct("find_unused_parameters", False, turned)


def no_buffers(_: bool, turned: KnobResult) -> None:
    """Broadcast buffers at the construction only.

    The constructor's argument broadcast_buffers=False would leave out that broadcast, too.
    """

    def switch_off(replica: Any) -> None:
        replica.broadcast_buffers = False
        turned.done()

    made(switch_off)


def compress(dtype: str, _: bool, turned: KnobResult) -> None:
    """Exchange gradients in a dtype: "bf16" or "fp16"."""
    hook = torchs_hook(f"{dtype}_compress_hook")
    hooked(turned, lambda replica: (None, hook))


def torchs_hook(name: str) -> Callable[..., Any]:
    """Return the default communication hook of PyTorch with this name."""

    def hook(group: Any, bucket: Any) -> Any:
        # Without CUDA DDP rejects the bfloat16 hook by its name, although gloo supports it.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        return getattr(default_hooks, name)(group, bucket)

    hook.__annotations__.clear()  # DDP accepts no annotations or exactly its own
    return hook


def hooked(turned: KnobResult, make: Callable[[Any], tuple[Any, Callable[..., Any]]]) -> None:
    """Register on every replica the state and the communication hook that ``make`` returns.

    A hook that the script has registered stays in place.
    """

    def first_forward(replica: Any) -> None:
        if replica._comm_hooks:
            turned.not_done("the script registers a communication hook")
            return
        replica.register_comm_hook(*make(replica))
        turned.done()

    before_forward(first_forward, once=True)


def before_forward(look: Callable[[Any], None], once: bool = False) -> None:
    """Call ``look`` with the replica before each (or the first) forward with gradients enabled."""

    def begins(replica: Any, *_: Any, **__: Any) -> None:
        import torch

        if torch.is_grad_enabled() and not (once and "_paceline_looked" in replica.__dict__):
            replica.__dict__["_paceline_looked"] = True
            look(replica)

    taps.REPLICA_FORWARD.before(begins)


def made(look: Callable[[Any], None], **options: Any) -> None:
    """Construct every replica with these options, then call ``look`` with it."""

    def construct(make: taps.Function, replica: Any, *args: Any, **given: Any) -> None:
        make(replica, *args, **given | options)
        look(replica)

    taps.REPLICA.around(construct)


def synchronize_last(_: bool, turned: KnobResult) -> None:
    """Synchronize gradients only in the last backward of a step."""
    AccumulationSync(turned)


class AccumulationSync:
    """Gradient synchronization only in the last backward of a step.

    The number of backwards of a step is assumed to be that of the previous step. If a step has
    fewer, the missing gradient synchronization is done before the optimizer's step, and the knob is
    disabled from then on. With loss scaling, a step begins where the scaler looks for infinite
    gradients: it must find the same ones on all ranks, and may then skip the optimizer's step.
    """

    def __init__(self, turned: KnobResult) -> None:
        self._turned = turned
        self._usual_count = 0  # forwards per replica in the previous step
        self._replicas: dict[int, tuple[Any, int]] = {}  # by id: replica, forwards in this step
        self._unsynced: set[int] = set()  # ids of replicas whose synchronization is disabled
        self._is_off = False
        before_forward(self._begin_forward)
        taps.on_step(before=self._step)
        for tap in (taps.UNSCALE, taps.SCALED_STEP):  # they look for infinite gradients
            tap.before(self._step)

    def _begin_forward(self, replica: Any) -> None:
        """Disable gradient synchronization of the next backward unless it is the step's last."""
        if not replica.require_backward_grad_sync and id(replica) not in self._unsynced:
            self._is_off = True
            self._turned.not_done("the script calls no_sync")
        count = self._replicas.get(id(replica), (replica, 0))[1] + 1
        self._replicas[id(replica)] = (replica, count)
        if self._is_off:
            return
        replica.require_backward_grad_sync = count >= self._usual_count
        (self._unsynced.discard if count >= self._usual_count else self._unsynced.add)(id(replica))

    def _step(self, *_: Any, **__: Any) -> None:
        """End the step's backwards; without effect if they have been ended already."""
        counts = {count for _, count in self._replicas.values()}
        if not counts:
            return
        behind = [replica for key, (replica, _) in self._replicas.items() if key in self._unsynced]
        for replica in behind:
            self._exchange(replica)
            replica.require_backward_grad_sync = True
        self._unsynced.clear()
        if behind:
            self._is_off = True
            notify(
                "warning: accumulate-locally: a step has fewer backwards than the one before; "
                "from now on DDP synchronizes gradients in each backward\n"
            )
        if len(counts) == 1 and not self._is_off:
            self._usual_count = counts.pop()
            if self._usual_count > 1:
                self._turned.done()
        self._replicas.clear()

    def _exchange(self, replica: Any) -> None:
        """Average the gradients over the ranks, as DDP's backward would have done."""
        import torch.distributed as dist

        for parameter in replica.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replica.process_group)
                parameter.grad /= replica.process_group.size()
