"""Samples of single steps: the kernels of a GPU, and the FLOPs of a step.

Kernels run asynchronously to the CPU code that launches them, so the times that the hooks measure
on the CPU do not show when the GPU computes. PyTorch's profiler records them during one block of
steps. They are written as events with times of the host's clock. Compute kernels with only short
gaps between them are merged into one event. Each communication kernel is one event, with the group
and number of the collective that launched it.

A dispatch mode of PyTorch intercepts every operator of the step whose FLOPs are counted, including
those of the backward and the optimizer. FLOPs are counted as in torch.utils.flop_counter: matrix
products, convolutions and attention, with 2 FLOPs per multiply-add; elementwise operators count as
0. The memory traffic of an operator is the size of its inputs and outputs, each counted once; reuse
of data in caches between operators is not considered. Code compiled with torch.compile runs
uncompiled in that step.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..pending_value import is_capturing
from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder, now
from ..ring.states import State

# Kernels of a GPU

FIRST_SAMPLED_STEP, SAMPLED_STEPS = 20, 20  # the sampled block of steps
MAX_MERGED_GAP_NS = 1_000  # between compute kernels of one event
COMMUNICATION_LIBRARIES = ("nccl", "rccl", "nvshmem")


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the device; times in ns of the profiler's clock."""

    name: str
    start: int
    end: int

    @property
    def communicates(self) -> bool:
        return any(word in self.name.lower() for word in COMMUNICATION_LIBRARIES)


def read_kernels(profiler: Any) -> list[Kernel]:
    """Return the kernels, copies and fills on CUDA devices that a stopped profiler recorded.

    A range of the script (``record_function``) or of NCCL is shown on the device as well, where its
    kernels ran: it is not work of the device.
    """
    events = profiler.profiler.kineto_results.events()
    on_device = (
        e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
    )
    return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device]


def write_kernels(
    recorder: Recorder, kernels: Iterable[Kernel], offset: int, launched: list[dict[str, int]]
) -> bool:
    """Write kernels as events; return whether communication kernels match the collectives.

    The i-th communication kernel is assigned to the i-th collective if there are as many kernels
    as collectives. Otherwise the collective of each kernel is unknown, and its time is counted as
    transfer.

    Args:
        recorder: Recorder that writes the events.
        kernels: Kernels in any order.
        offset: The recorder's clock minus the profiler's clock, in ns.
        launched: The collectives that this rank launched while kernels were sampled, in order.
    """
    by_start = sorted(kernels, key=lambda kernel: kernel.start)
    computing = [kernel for kernel in by_start if not kernel.communicates]
    talking = [kernel for kernel in by_start if kernel.communicates]
    start = end = count = 0
    for kernel in computing:
        if count and kernel.start <= end + MAX_MERGED_GAP_NS:
            end, count = max(end, kernel.end), count + 1
            continue
        if count:
            recorder.event(State.KERNEL, start + offset, end + offset, amount=count)
        start, end, count = kernel.start, kernel.end, 1
    if count:
        recorder.event(State.KERNEL, start + offset, end + offset, amount=count)
    known = len(talking) == len(launched)
    for i, kernel in enumerate(talking):
        fields = launched[i] if known else {}
        recorder.event(
            State.COMMUNICATION_KERNEL, kernel.start + offset, kernel.end + offset, **fields
        )
    return known


class KernelSampler:
    """Profiler of ``SAMPLED_STEPS`` steps, from ``FIRST_SAMPLED_STEP`` or $PACELINE_KERNELS_FROM.

    Steps count from the start of the process, also in a run that resumes. Nothing is sampled while
    the script runs a profiler itself (a second profiling session would silently take the events of
    the first one), nor started or ended while a step is captured into a CUDA graph.
    """

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[Any], list[Kernel]] = read_kernels,
        activity: Any = torch.profiler.ProfilerActivity.CUDA,
    ) -> None:
        self.recorder = recorder
        self._read = read
        self._activity = activity
        self._profiler: Any = None
        self._offset = 0
        self._starting = self._has_begun = False
        self._steps = 0
        self.first = int(os.environ.get("PACELINE_KERNELS_FROM", FIRST_SAMPLED_STEP))

    def after_step(self) -> None:
        """Start or end the sampling; called at the end of every training step."""
        self._steps += 1
        if self._steps < self.first or is_capturing():
            return
        if not self._has_begun:
            self._has_begun = True
            self._last = self._steps + SAMPLED_STEPS
            self._begin()
        elif self._steps >= self._last:
            self.finish()

    def finish(self) -> None:
        """Write the kernels of the steps that were sampled so far, and sample no more."""
        if self._profiler is not None:
            self._end()

    def _begin(self) -> None:
        if self._activity not in torch.profiler.supported_activities():
            return
        if _profiler_enabled():
            notify("paceline: the script runs a profiler, so Paceline records no GPU kernels\n")
            return
        self._starting = True
        self._profiler = torch.profiler.profile(activities=[self._activity])
        self._profiler.start()
        self._starting = False
        self.recorder.launched_collectives = []
        self._offset = now() - time.time_ns()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler = self._stopped()
        offset = (self._offset + now() - time.time_ns()) // 2
        launched, self.recorder.launched_collectives = (
            self.recorder.launched_collectives or [],
            None,
        )
        if not write_kernels(self.recorder, self._read(profiler), offset, launched):
            notify(
                "paceline: the number of communication kernels differs from that of collectives, "
                "so their time counts as transfer\n"
            )

    def give_way(self) -> None:
        """Stop sampling and discard the kernels, because the script starts a profiler."""
        if self._profiler is not None and not self._starting:
            self._stopped()
            self.recorder.launched_collectives = None
            notify("paceline: the script runs a profiler, so Paceline records no GPU kernels\n")

    def _stopped(self) -> Any:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler


# FLOPs and memory traffic


COUNTED_STEP = 10  # from 0; after the warm-up, before FIRST_SAMPLED_STEP
MAX_LISTED_OPERATORS = 8  # listed individually: the record's header is small
# They allocate memory or return a view, without reading or writing data.
FREE_OPERATORS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
)
# Namespaces of communication and profiling operators.
UNCOUNTED_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler")
PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
aten: Any = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Dispatch mode that writes the FLOPs and bytes of one step to the record's header."""

    def __init__(self, recorder: Recorder, step: int = COUNTED_STEP) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.step = recorder, step
        self._thread = 0  # identifier of the training thread during the counted step, else 0
        self._ops: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self._kinds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._uncounted: set[str] = set()
        self._started = 0.0

    def after_step(self) -> None:
        """Start or end the count; called at the end of every training step."""
        if self.recorder.step == self.step:
            self._thread = threading.get_ident()
            self._started = time.perf_counter()
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self._thread:
            self._end()

    def _end(self) -> None:
        inside = _get_current_dispatch_mode() is self and self._thread == threading.get_ident()
        self._thread = 0
        if not inside:  # the script entered a dispatch mode, or trains in another thread
            notify(f"warning: Paceline could not count the FLOPs of step {self.step}\n")
            return
        seconds = time.perf_counter() - self._started
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.recorder.update_header(work=self._found(seconds))

    def _found(self, seconds: float) -> dict[str, Any]:
        device, precision = max(self._kinds, key=self._kinds.__getitem__, default=("", ""))
        ops = sorted(self._ops.items(), key=lambda op: (-op[1][1], -op[1][2]))
        return {
            "step": self.step,
            "seconds": seconds,
            "flops": sum(figures[1] for _, figures in ops),
            "bytes": sum(figures[2] for _, figures in ops),
            "device": device,
            "precision": precision,
            "ops": [[name, *figures] for name, figures in ops[:MAX_LISTED_OPERATORS]],
            "uncounted": sorted(self._uncounted)[:MAX_LISTED_OPERATORS],
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not PLAIN_DISPATCH for kind in types):
            return NotImplemented  # e.g. DTensor: the operators that it calls are dispatched here
        kwargs = kwargs or {}
        start = time.perf_counter()
        out = func(*args, **kwargs)
        end = time.perf_counter()
        if self._thread and func.namespace == "aten":
            self._count(func, args, kwargs, out, end - start)
        elif self._thread and func.namespace not in UNCOUNTED_NAMESPACES:
            self._uncounted.add(func.name())
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, seconds: float) -> None:
        packet = func._overloadpacket
        name = packet.__name__
        if func.is_view or name in FREE_OPERATORS:
            return
        tensors = {id(t): t for t in (*tensors_in(args), *tensors_in(kwargs.values()))}
        written = list(tensors_in((out,)))
        if not written:
            return
        try:
            flops = count_flops(packet, args, kwargs, out)
        except Exception:  # a formula that does not apply must not end the training
            self._uncounted.add(func.name())
            return
        figures = self._ops[name]
        figures[0] += 1
        figures[1] += flops
        figures[2] += sum(map(tensor_bytes, (*tensors.values(), *written)))
        on_cpu = written[0].device.type == "cpu"  # on GPUs the call returns early
        figures[3] += seconds if on_cpu else 0.0
        if flops:
            first = next(t for t in tensors.values() if t.is_floating_point())
            self._kinds[str(written[0].device), _precision(first, "convolution" in name)] += flops


def _lstm(given: torch.Tensor, weights: Iterable[torch.Tensor]) -> float:
    """Return the FLOPs of a fused LSTM's forward: 2 per weight and input vector."""
    return 2.0 * given.shape[0] * given.shape[1] * sum(w.numel() for w in weights if w.dim() > 1)


# FLOPs of operators that torch.utils.flop_counter lacks: attention on the CPU, fused LSTMs.
_MORE: dict[Any, Callable[[Any], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda a: sdpa_flop_count(
        *(t.shape for t in a[:3])
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda a: sdpa_backward_flop_count(
        *(t.shape for t in a[:4])
    ),
    aten.mkldnn_rnn_layer: lambda a: _lstm(a[0], a[1:3]),
    aten.mkldnn_rnn_layer_backward: lambda a: 2 * _lstm(a[0], a[1:3]),
    aten._cudnn_rnn: lambda a: _lstm(a[0], a[1]),
    aten._cudnn_rnn_backward: lambda a: 2 * _lstm(a[0], a[1]),
}


def count_flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    return float(_MORE[packet](args)) if packet in _MORE else 0.0


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; at most those of its storage, if the tensor is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _precision(tensor: torch.Tensor, is_convolution: bool) -> str:
    """Return the precision of a product of this tensor, named as in the machine file."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and tensor.is_cuda and uses_tf32(is_convolution) else name


def uses_tf32(is_convolution: bool) -> bool:
    """Return whether a GPU may compute float32 products, or convolutions, as TF32.

    PyTorch 2.9 has a setting for each kind. In a script that uses it, the older functions raise an
    error.
    """
    cudnn: Any = torch.backends.cudnn
    kind = getattr(cudnn, "conv", None) if is_convolution else torch.backends.cuda.matmul
    setting = getattr(kind, "fp32_precision", None)
    if setting is not None:
        return bool(setting == "tf32")
    return bool(
        cudnn.allow_tf32 if is_convolution else torch.get_float32_matmul_precision() != "highest"
    )
