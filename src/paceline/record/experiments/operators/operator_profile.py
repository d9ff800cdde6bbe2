"""Profile of the operators of a few steps: by line of the script, module and operator.

A dispatch mode of PyTorch intercepts every operator, including those of the backward and of the
optimizer. An operator of a backward belongs to the line whose forward made its node of the
autograd graph. The time of an operator is the time of its kernel (on a GPU: until the stream is
idle) plus the cost of dispatching a small operator, which is measured without the profile. The
profiled steps are slower than others, and no figure of the diagnosis is taken from them.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from ...hooks.flop_counter import (
    FREE_OPERATORS,
    PLAIN_DISPATCH,
    UNCOUNTED_NAMESPACES,
    count_flops,
    tensor_bytes,
    tensors_in,
)
from ...hooks.taps import Function, around
from .call_sites import NO_LINE, CallSites, ModuleStack
from .calls import BackwardGraph, BackwardRun, Call, Step, mark_second_backwards, mark_used
from .machine_limits import operator_clock

# Numbers of tensor values within a step: equal operators on equal values are a repetition.
#
# Each operator is identified by its function and the numbers of its inputs. If the same operator
# was called before with the same numbers, its outputs get the same numbers again. A tensor that was
# changed in place, and the output of a random operator, gets a new number.


_torch_c: Any = torch._C
_WeakTensorRef = _torch_c._WeakTensorRef  # unlike weakref.ref, survives Python's object


@dataclass(slots=True)
class _Known:
    """One tensor: a weak reference, its version when it was numbered, and its producer."""

    ref: Any
    version: int
    number: int
    producer: Any


class ValueNumbers:
    """Table of the tensors of a step, by their identity and version."""

    def __init__(self) -> None:
        self._count = count()
        self._known: dict[int, _Known] = {}
        self._results: dict[Any, tuple[list[int], Any]] = {}  # of a key: numbers, and producer

    def begin_step(self) -> None:
        """Forget which operators were called; keep which operator produced which tensor."""
        self._results.clear()
        dead = [key for key, known in self._known.items() if known.ref.expired()]
        for key in dead:
            del self._known[key]

    def producers(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the producers of these tensors, as far as they are known."""
        known = [one for tensor in tensors if (one := self._known.get(id(tensor))) is not None]
        return [one.producer for one in known if one.producer and not one.ref.expired()]

    def key(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the identity of a call, or None if its arguments cannot be compared."""
        try:
            key = (function, self._freeze(args), self._freeze(tuple(kwargs.items())))
            hash(key)
        except TypeError:
            return None
        return key

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", self._number(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._freeze, value))
        return (type(value), value)

    def _number(self, tensor: torch.Tensor) -> int:
        known, version = self._known.get(id(tensor)), _version(tensor)
        if known is not None and known.version == version and not known.ref.expired():
            return known.number
        producer = known.producer if known is not None and not known.ref.expired() else None
        return self._store(tensor, next(self._count), producer)

    def _store(
        self, tensor: torch.Tensor, number: int, producer: Any, base: torch.Tensor | None = None
    ) -> int:
        # Autograd lets a view share the version of its base only after the dispatch mode.
        version = _version(tensor if base is None else base)
        self._known[id(tensor)] = _Known(_WeakTensorRef(tensor), version, number, producer)
        return number

    def store_outputs(
        self, key: Any, out: Any, producer: Any, base: torch.Tensor | None = None
    ) -> Any:
        """Number the outputs of a call; return the producer of the same call before, or None.

        Args:
            key: Identity of the call. None for a random operator, or one that changes its inputs:
                the numbers are new.
            base: The tensor whose memory the outputs share, for a view.
        """
        outputs = list(tensors_in((out,)))
        numbers, earlier = self._results.get(key, ([], None)) if key is not None else ([], None)
        if earlier is None or len(numbers) != len(outputs):
            earlier, numbers = None, [next(self._count) for _ in outputs]
            if key is not None:
                self._results[key] = numbers, producer
        for tensor, number in zip(outputs, numbers, strict=True):
            self._store(tensor, number, producer, base)
        return earlier

    def alias(self, out: Any, tensor: torch.Tensor, producer: Any) -> None:
        """Give the output of ``detach`` or ``alias`` the number of its input."""
        for one in tensors_in((out,)):
            self._store(one, self._number(tensor), producer, tensor)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


MAX_CALLS_PER_STEP = 400_000  # operators; later ones of the step are not profiled
MAX_GROWTH = 1e6  # stored for operators without inputs
COPIES = ("clone", "copy_", "_to_copy", "_reshape_copy", "repeat")
ALIASES = ("detach", "alias", "lift_fresh")
# Operators whose autograd node keeps their output, for which PyTorch detaches it.
SAVED_OUTPUTS = ("relu", "sigmoid", "tanh", "_softmax", "_log_softmax", "exp", "sqrt", "rsqrt")
BATCH_NORMS = (
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("cudnn_batch_norm", "miopen_batch_norm"),
)
TRAINING = 5  # position of this argument of BATCH_NORMS
PAD, IMAGE_DIMENSIONS = "constant_pad_nd", 4
CREATE_GRAPH = 2  # position of this argument of torch.autograd._engine_run_backward, after outputs
WIDE_DTYPES = (torch.float64, torch.complex128)


class OperatorProfiler(TorchDispatchMode):
    """Dispatch mode that notes every operator of the steps between ``start`` and ``stop``."""

    def __init__(self, device: str, optimized: Callable[[], set[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.failure = ""  # the first error of the profile itself
        self._optimized = optimized
        self._sites, self._values = CallSites(), ValueNumbers()
        self._modules = ModuleStack(self._padding_of)
        self._infos: dict[Any, _Info] = {}
        self._last_sequence, self._began = 0, 0.0
        self._made: dict[int, Call] = {}  # forward call by the number of its autograd node
        self._clock, self._synchronize = operator_clock(device)
        self._running: BackwardRun | None = None  # the backward that runs now
        self._previous: Call | None = None

    def start(self) -> None:
        """Begin to profile, and with it the first step."""
        self._modules.install()
        self._restore_backward = around(torch.autograd, "_engine_run_backward", self._run_backward)
        self.__enter__()  # type: ignore[no-untyped-call]
        self._begin()

    def after_step(self) -> None:
        """End a step and begin the next one."""
        self.steps[-1].seconds = time.perf_counter() - self._began
        self._begin()

    def stop(self) -> list[Step]:
        """End the profile; return the complete steps."""
        if _get_current_dispatch_mode() is self:  # else the script entered one, too
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._restore_backward()
        self._modules.remove()
        mark_used(self.steps)
        for step in self.steps:
            mark_second_backwards(step.backwards)
        return self.steps[:-1]

    def _begin(self) -> None:
        self.steps.append(Step(BackwardGraph(self._optimized)))
        self._values.begin_step()
        self._made.clear()
        self._last_sequence = _next_sequence()
        self._began = time.perf_counter()

    def _run_backward(self, run: Function, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        accumulates, outer = bool(kwargs.get("accumulate_grad")), self._running
        try:
            self.steps[-1].graph.add(tuple(outputs), accumulates)
            line, _, _ = self._sites.find()
            creates_graph = bool(args[CREATE_GRAPH]) if len(args) > CREATE_GRAPH else True
            self._running = BackwardRun(line, accumulates, creates_graph)
            self.steps[-1].backwards.append(self._running)
        except Exception as error:  # the training goes on without the analysis
            self._failed(error)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            self._running = outer

    def _padding_of(self, inputs: Any) -> float | None:
        """Return the padded share of the inputs of a module; None without fitting inputs."""
        try:
            tensor, share = padded_share(inputs)
            if tensor is None:
                return None
            origins = _origins(self._values.producers([tensor])) if share else []
            if tensor.dim() == IMAGE_DIMENSIONS and not any(one.name == PAD for one in origins):
                return 0.0  # images may have a border of their own
            for call in origins:
                call.pads = True
            return share
        except Exception as error:
            self._failed(error)
            return 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not PLAIN_DISPATCH for kind in types):
            return NotImplemented  # e.g. DTensor: the operators that it calls are dispatched here
        kwargs = kwargs or {}
        if self.failure or func.namespace in UNCOUNTED_NAMESPACES:
            return func(*args, **kwargs)
        before = None
        with contextlib.suppress(Exception):
            before = self._before(func, args, kwargs)
        self._synchronize()
        start = self._clock()
        out = func(*args, **kwargs)
        self._synchronize()
        took = self._clock() - start
        try:
            if before is not None and len(self.steps[-1].calls) < MAX_CALLS_PER_STEP:
                self._note(func, before, out, took)
        except Exception as error:
            self._failed(error)
        return out

    def _failed(self, error: Exception) -> None:
        self.failure = self.failure or f"{type(error).__name__}: {error}"[:200]

    def _before(self, func: Any, args: Any, kwargs: Any) -> "_Before":
        """Return what has to be known of a call before it changes its inputs."""
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = _Info.of(func)
        tensors = list({id(t): t for t in tensors_in((*args, *kwargs.values()))}.values())
        random = info.random or info.changes or info.name in FREE_OPERATORS
        compared = args
        if info.name in BATCH_NORMS and len(args) > TRAINING and args[TRAINING]:
            # The running statistics have no effect on the output.
            random, compared = False, (*args[:3], *args[TRAINING:])
        key = None if random else self._values.key(func, compared, kwargs)
        return _Before(info, args, kwargs, tensors, key, self._values.producers(tensors))

    def _note(self, func: Any, before: "_Before", out: Any, took: float) -> None:
        info = before.info
        call = self._located(info.name)
        written = list(tensors_in((out,)))
        call.seconds, call.is_view = took, info.is_view
        call.random = info.random
        call.needs = before.producers
        if not info.is_view and info.name not in (*FREE_OPERATORS, *ALIASES):
            self._measure(call, func, before, out, written)
        call.repeated = self._number(call, before, out)
        call.is_root = info.changes or not written or call.phase != "forward"
        sequence = _next_sequence()
        if sequence > self._last_sequence:
            call.node = sequence - 1
            self._made |= dict.fromkeys(range(self._last_sequence, sequence), call)
            self._last_sequence = sequence
        else:
            call.is_root |= self._may_be_read(call, info)
        self._previous = call
        self.steps[-1].calls.append(call)

    def _may_be_read(self, call: Call, info: "_Info") -> bool:
        """Return whether Python may read the output of a call that has no autograd node."""
        if info.name != "detach":
            return not info.is_view and info.name not in ALIASES
        detached = call.needs[-1] if call.needs else None
        return (
            detached is None
            or detached is not self._previous
            or (detached.name not in SAVED_OUTPUTS)
        )

    def _located(self, name: str) -> Call:
        """Return a call with its line, module and phase."""
        line, optimizer, checkpoint = self._sites.find()
        node = torch._C._current_autograd_node()
        padding = self._modules.padding or 0.0
        if node is None:
            phase = "optimizer" if optimizer else "forward"
            call = Call(line, self._modules.current, name, phase, padding=padding)
            call.is_recurrent = self._modules.is_recurrent
            return call
        made = self._made.get(node._sequence_nr())
        where = line if line != NO_LINE or made is None else made.line
        module = made.module if made is not None else self._modules.current
        call = Call(where, module, name, "backward")
        call.unneeded = node._sequence_nr() in self.steps[-1].graph.unneeded
        # A repeated forward has a backward of its own; checkpointing repeats it in the backward.
        call.made, call.repeated = made, made is not None and made.repeated
        call.padding = made.padding if made is not None else padding
        call.is_recurrent = made is not None and made.is_recurrent
        if self._running is not None and not checkpoint:
            self._running.calls.setdefault(node._sequence_nr(), []).append(call)
        if checkpoint:  # of a module of torch, no line of the script is on the stack
            call.phase, call.module = "recomputation", self._modules.current or module
        return call

    def _number(self, call: Call, before: "_Before", out: Any) -> bool:
        """Number the outputs; return whether the call repeats another one without need."""
        info = before.info
        if info.name in ALIASES and before.tensors:
            self._values.alias(out, before.tensors[0], call)
            return call.repeated
        base = before.tensors[0] if info.is_view and before.tensors else None
        call.same = self._values.store_outputs(before.key, out, call, base)
        plain = info.is_view or info.name in COPIES or not before.tensors
        needless = call.phase == "forward" and not self._modules.evaluates
        return call.repeated or (call.same is not None and not plain and needless)

    def _measure(
        self, call: Call, func: Any, before: "_Before", out: Any, written: list[torch.Tensor]
    ) -> None:
        """Store shapes, FLOPs, bytes and dtypes of a call."""
        read = before.tensors
        with contextlib.suppress(Exception):  # a formula that does not apply
            call.flops = count_flops(func._overloadpacket, before.args, before.kwargs, out)
        known = {id(t) for t in read}
        inputs = sum(map(tensor_bytes, read))
        call.output_bytes = sum(tensor_bytes(t) for t in written if id(t) not in known)
        call.bytes = inputs + call.output_bytes
        call.growth = min(call.output_bytes / max(inputs, 1), MAX_GROWTH)
        call.shapes = ", ".join(map(_describe, read[:3] or written[:1]))
        call.wide = any(t.dtype in WIDE_DTYPES and t.numel() > 1 for t in (*read, *written))
        call.widens = (
            call.wide
            and call.phase == "forward"
            and not any(t.dtype in WIDE_DTYPES and t.dim() for t in read)
        )
        if before.info.name in COPIES and written:
            source = read[-1] if before.info.name == "copy_" and read else read[0]
            target = written[0]
            call.copy = "layout"
            if source.device != target.device:
                call.copy = "transfer"
            elif source.dtype != target.dtype:
                call.copy = "cast"


@dataclass(frozen=True)
class _Info:
    """What is the same for all calls of an operator."""

    name: str
    is_view: bool
    changes: bool  # its inputs
    random: bool

    @classmethod
    def of(cls, func: Any) -> "_Info":
        return cls(
            func._overloadpacket.__name__,
            func.is_view,
            func._schema.is_mutable,
            torch.Tag.nondeterministic_seeded in func.tags,
        )


@dataclass(frozen=True, slots=True)
class _Before:
    info: _Info
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]
    key: Any
    producers: list[Any]


def _origins(calls: list[Call]) -> list[Call]:
    """Return the operators that made these values, before they were copied or viewed."""
    found: list[Call] = []
    for call in calls:
        copies = call.needs if call.is_view or call.copy or call.name in ALIASES else []
        found += _origins(copies) or [call]
    return found


def _next_sequence() -> int:
    autograd: Any = torch._C._autograd
    return int(autograd._get_sequence_nr())


def _describe(tensor: torch.Tensor) -> str:
    sides = "x".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sides}]"


# Padding in the inputs of a model: values at the end of samples that are all the same.


MAX_ELEMENTS = 1 << 24  # of a tensor that is inspected


def padded_share(inputs: Any) -> tuple[torch.Tensor | None, float]:
    """Return the largest tensor of a module's inputs, and the share of it that is padding.

    Padding is the same value at the end of a sample. Samples are sequences: tokens of shape (batch,
    length), or vectors (batch, length, features). Of other tensors, only what all samples have at
    the end of one of the last two dimensions counts.
    """
    candidates = [one for one in tensors_in(inputs) if _may_be_padded(one)]
    if not candidates:
        return None, 0.0
    tensor = max(candidates, key=torch.Tensor.numel)
    with torch.no_grad(), _disable_current_modes():
        return tensor, max(_shares(tensor))


def _may_be_padded(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    sides = tensor.shape
    return plain and len(sides) in (2, 3, 4) and sides[0] > 1 and tensor.numel() <= MAX_ELEMENTS


def _shares(tensor: torch.Tensor) -> Iterable[float]:
    length = tensor.shape[1]
    same = tensor == tensor[0, -1].flatten()[-1]
    if tensor.dim() == 3 or (tensor.dim() == 2 and not tensor.is_floating_point()):
        by_position = same.flatten(2).all(2) if tensor.dim() == 3 else same
        at_end = by_position.flip(1).cumprod(1).sum(1)
        yield float(at_end[at_end < length].sum()) / same.shape[0] / length
    for axis in range(max(1, tensor.dim() - 2), tensor.dim()):
        common = same.movedim(axis, 0).flatten(1).all(1)
        at_end = common.flip(0).cumprod(0).sum()
        # One constant column may be a feature.
        yield float(at_end) / common.numel() if 1 < at_end < common.numel() else 0.0
