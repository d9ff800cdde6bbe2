"""What one sampled step computes: the FLOPs and the memory traffic of its operators.

A dispatch mode of PyTorch sees every operator of that step, in the backward and the optimizer
too. FLOPs are those of torch.utils.flop_counter: matrix products, convolutions, attention (a
multiply-add is two); elementwise work counts none. Traffic is each operator's inputs and outputs
once, as if nothing stayed in a cache between two operators. Code of torch.compile runs
uncompiled in that step.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder

COUNTED_STEP = 10  # counted from 0: warm, and before kernels are sampled (kernels.FIRST)
MAX_LISTED_OPERATORS = 8  # operators that are written one by one: a record's header is small
# They give memory or another view of it, and move nothing.
FREE_OPERATORS = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
)
# Of communication and of profilers.
UNCOUNTED_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler")
PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
aten: Any = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Counts in one step of the recorder's process, and writes the sum into its header."""

    def __init__(self, recorder: Recorder, step: int = COUNTED_STEP) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.step = recorder, step
        self._thread = 0  # that trains, while it is counted
        self._ops: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        self._kinds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._uncounted: set[str] = set()
        self._started = 0.0

    def after_step(self) -> None:
        """Called at the end of every step of the job."""
        if self.recorder.step == self.step:
            self._thread = threading.get_ident()
            self._started = time.perf_counter()
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self._thread:
            self._end()

    def _end(self) -> None:
        inside = _get_current_dispatch_mode() is self and self._thread == threading.get_ident()
        self._thread = 0
        if not inside:  # a mode of the script's own lies above, or another thread trains
            notify(f"warning: the FLOPs of step {self.step} could not be counted\n")
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
            return NotImplemented  # a DTensor, say: what it makes of it comes here by itself
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
        tensors = {id(t): t for t in (*_tensors(args), *_tensors(kwargs.values()))}
        written = list(_tensors((out,)))
        if not written:
            return
        try:
            flops = _flops(packet, args, kwargs, out)
        except Exception:  # a formula that does not fit must not end a training
            self._uncounted.add(func.name())
            return
        figures = self._ops[name]
        figures[0] += 1
        figures[1] += flops
        figures[2] += sum(map(_bytes, (*tensors.values(), *written)))
        on_cpu = written[0].device.type == "cpu"  # elsewhere the call returns before the work
        figures[3] += seconds if on_cpu else 0.0
        if flops:
            first = next(t for t in tensors.values() if t.is_floating_point())
            self._kinds[str(written[0].device), _precision(first)] += flops


def _lstm(given: torch.Tensor, weights: Iterable[torch.Tensor]) -> float:
    """Of a fused LSTM's forward: each weight meets each vector of the input once."""
    return 2.0 * given.shape[0] * given.shape[1] * sum(w.numel() for w in weights if w.dim() > 1)


# What flop_counter does not know: attention on the processor, and fused LSTMs.
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


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> float:
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    return float(_MORE[packet](args)) if packet in _MORE else 0.0


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensor: torch.Tensor) -> int:
    """Of an expanded tensor those that there are."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _precision(tensor: torch.Tensor) -> str:
    """As the machine file names it."""
    name = str(tensor.dtype).removeprefix("torch.")
    fast = tensor.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if name == "float32" and fast else name
