"""Norms of the gradients before and after their exchange, of sampled steps.

From both follows the gradient noise scale (``analyze.figures.noise_scale``). The process group is
where both are seen: a backward gives it the gradient of this rank's samples, and gets that of all
ranks' samples. What Python code exchanges in a backward (a communication hook that compresses) is
no gradient as it is used, and such steps are not sampled.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..pending_value import PendingValue, is_capturing
from ..ring.recorder import Recorder, now
from ..ring.states import SQUARE_OFFSET, SQUARE_UNIT, Op, State
from .collective_check import option_of
from .hook_failures import failed_hooks, report_failure
from .taps import SCALE_LOSS

MAX_COST = 0.003  # share of the time of the steps between two samples
FIRST_STEP = 2  # DDP's first step exchanges other buckets than later ones
MAX_INTERVAL = 1 << 14  # steps
MAX_KEPT = 4096  # samples that world.noise_scale() uses
DEVICE_BYTES_PER_S = 1e12  # at which a GPU reads gradients, for what a sample costs there
HOOK = "the norms of gradients"
_in_backward = torch._C._current_graph_task_id


def _encode(value: float) -> int:
    """Return a squared norm as the amount of an event, with a relative precision of 1e-12."""
    return round((math.log2(value) + SQUARE_OFFSET) * SQUARE_UNIT)


class _LossScale:
    """Scale of the losses of this step, of a gradient scaler; None if they are not scaled."""

    value: ClassVar[torch.Tensor | None] = None
    is_noted: ClassVar[bool] = False


def _note_scale(scaled: Any, scaler: Any, *_: Any, **__: Any) -> None:
    """Note the scale with which a gradient scaler scales a loss. It changes from step to step."""
    _LossScale.value = scaler._scale


class GradientNoise:
    """The norms of one rank's gradients.

    Attributes:
        is_sampling: Whether gradients of the present step are measured.
        kept: By number of the newest sampled steps: samples of this rank, squared norm of its
            gradient, and this rank's part of the squared norm of all ranks' gradient.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.is_sampling = False
        self.kept: dict[int, tuple[int, float, float]] = {}
        self._recorder = recorder
        self._due, self._interval = FIRST_STEP, 1
        self._sampled_ns, self._last_end = 0, now()
        self._waiting: deque[tuple[int, int, PendingValue, PendingValue]] = deque()
        if not _LossScale.is_noted:
            _LossScale.is_noted = True
            SCALE_LOSS.after(_note_scale)
        self._begin()

    def _begin(self) -> None:
        _LossScale.value = None
        self._scale: torch.Tensor | None = None
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._backward = -1
        self._is_whole = True  # what was exchanged is one gradient, over all ranks
        self._open = 0  # exchanges that have not ended
        self._cost_ns = 0

    def launched(
        self, group: dist.ProcessGroup, op: Op, args: tuple[Any, ...], by_engine: bool
    ) -> Callable[[], None] | None:
        """Note the exchange of gradients that begins; return what is to be called at its end."""
        if torch._C._autograd._profiler_enabled():  # it would contain the operators of the norms
            self._is_whole = False
            return None
        start = now()
        tensors, outputs = _tensors(op, args)
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            return None  # which parameters were used
        if op != Op.REDUCE_SCATTER and not by_engine:
            return None  # of a norm over all ranks, or of a communication hook
        factor = _factor(option_of(args, "reduceOp"), group.size())
        backward = _in_backward()
        is_first = self._backward in (-1, backward)
        self._backward = backward
        is_whole = group.size() == dist.get_world_size() and not self._recorder.shares_samples
        if not (is_first and factor and is_whole):
            self._is_whole = False
            return None
        if self._scale is None and _LossScale.value is not None:
            self._scale = _LossScale.value.detach().clone()  # the scaler changes it in place
        self._before.append(_square(tensors))
        self._open += 1
        self._cost_ns += now() - start + _device_ns(tensors)
        share = 1.0 if op == Op.REDUCE_SCATTER else 1 / group.size()
        return functools.partial(self._ended, outputs, factor * factor * share)

    def _ended(self, outputs: Sequence[torch.Tensor], factor: float) -> None:
        if not self._open or is_capturing():
            return  # the step has ended without it
        start = now()
        try:
            self._after.append(_square(outputs) * factor)
        except Exception as error:  # a GPU without free memory: the script must go on
            self.is_sampling = self._is_whole = False
            report_failure(HOOK, error)
        self._open -= 1
        self._cost_ns += now() - start + _device_ns(outputs)

    def after_step(self, samples: int) -> None:
        """Note the end of an optimizer step that trained ``samples`` samples on this rank."""
        if HOOK in failed_hooks:
            self.is_sampling = False
            return
        try:
            end = now()
            step_ns, self._last_end = end - self._last_end, end
            if self.is_sampling and not is_capturing():
                self._keep(samples)
                self._recorder.extra_cost_ns += self._cost_ns + now() - end
                self._choose_interval(step_ns)
            self._write()
            self._begin()
            self.is_sampling = self._recorder.step + 1 >= self._due
        except Exception as error:
            report_failure(HOOK, error)

    def _keep(self, samples: int) -> None:
        exchanged = bool(self._before) and self._is_whole and not self._open
        if exchanged and samples > 0:
            before, after = (torch.stack(each).sum() for each in (self._before, self._after))
            if self._scale is not None:
                square = self._scale.to(before.device, torch.float64).square()
                before, after = before / square, after / square
            pending = PendingValue(before), PendingValue(after)
            self._waiting.append((self._recorder.step, samples, *pending))

    def _choose_interval(self, step_ns: int) -> None:
        """Sample so seldom that it costs MAX_COST; all ranks at powers of two, so in common."""
        wanted = self._cost_ns / (MAX_COST * max(step_ns - self._cost_ns, 1))
        interval = 1 << max(math.ceil(math.log2(max(wanted, 1))), 0)
        # one slow sample is not believed; a rank that waited for a core would never sample again
        self._interval = min(max(interval, 1), 4 * self._interval, MAX_INTERVAL)
        self._due = (self._recorder.step // self._interval + 1) * self._interval

    def _write(self) -> None:
        """Write the values that have arrived from the device."""
        while self._waiting and all(value.is_known for value in self._waiting[0][2:]):
            step, samples, *pending = self._waiting.popleft()
            before, after = (float(value.read()) for value in pending)
            if not (0 < before < math.inf and 0 < after < math.inf):
                continue  # a loss that is not finite, or a step that loss scaling skipped
            self.kept[step] = samples, before, after
            if len(self.kept) > MAX_KEPT:
                del self.kept[next(iter(self.kept))]
            at = now()
            for number, value in enumerate((before, after)):
                self._recorder.event(
                    State.GRADIENT, at, at, _encode(value), step, 0, number, min(samples, 2**31 - 1)
                )


def _tensors(op: Op, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the inputs and the outputs of a reduction."""
    if op == Op.ALL_REDUCE:
        found = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
        return found, found
    if isinstance(args[1], torch.Tensor):  # FSDP's flat gradients
        return [args[1]], [args[0]]
    return [], []


def _factor(reduction: Any, size: int) -> float:
    """Return what makes the mean of the inputs from the output; 0 if that is not known."""
    kinds = ((dist.ReduceOp.SUM, 1 / size), (dist.ReduceOp.AVG, 1.0))
    return next((factor for kind, factor in kinds if reduction == kind), 0.0)


def _square(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squared elements, float64 on the tensors' device."""
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors], 2, wide)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _device_ns(tensors: Sequence[torch.Tensor]) -> int:
    """Return about how long a GPU reads the tensors, which the host does not see."""
    if tensors[0].device.type == "cpu":
        return 0
    return int(sum(tensor.nbytes for tensor in tensors) / DEVICE_BYTES_PER_S * 1e9)
