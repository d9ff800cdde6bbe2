"""Profile of the operators of a few steps: by line of the script, module and operator.

A dispatch mode of PyTorch intercepts every operator, including those of the backward and of the
optimizer. An operator of a backward belongs to the line whose forward made its node of the
autograd graph. The time of an operator is the time of its kernel (on a GPU: until the stream is
idle) plus the cost of dispatching a small operator, which is measured without the profile. The
profiled steps are slower than others, and no figure of the diagnosis is taken from them.

The sums are written to a file beside the rank's record (rank-N.operators), whose layout is in
docs/reference/formats/record-format.md; the reader is analyze/records/operator_file.py.
"""

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ...hooks.sampled_steps import (
    FREE_OPERATORS,
    PLAIN_DISPATCH,
    UNCOUNTED_NAMESPACES,
    count_flops,
    tensor_bytes,
    tensors_in,
)
from ...hooks.taps import Function, around, parameters_of
from ...ring.ring import OPERATORS_SUFFIX
from ..lines.sidecar import write_json
from ..rung import PROFILE_USED, PROFILE_WARM_UP, PROFILED_STEPS
from .call_sites import NO_LINE, CallSites, Line, ModuleStack, code_of, padded_share
from .calls import (
    BackwardGraph,
    BackwardRun,
    Call,
    Step,
    correct_times,
    mark_second_backwards,
    mark_used,
)
from .machine_limits import measure_dispatch, measure_limits, operator_clock

FORMAT_VERSION = 1
MAX_ROWS = 4096  # of the file: those that take longest


@dataclass
class _Row:
    """Sums over the calls of one operator at one line, in one module and phase."""

    shapes: str = ""
    longest_s: float = 0.0  # of the call with these shapes
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    most: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, call: Call) -> None:
        self.sums["calls"] += 1
        self.sums["seconds"] += call.seconds
        self.sums["flops"] += call.flops
        self.sums["bytes"] += call.bytes
        self.sums["small_calls"] += call.small
        self.sums["small_s"] += call.seconds * call.small
        self.sums["repeated_s"] += call.seconds * call.repeated
        self.sums["unused_s"] += call.seconds * call.unused
        self.sums["unneeded_s"] += call.seconds * call.unneeded
        self.sums["float64_s"] += call.seconds * call.wide
        self.sums["padded_s"] += call.seconds * call.padding
        self.most["output_bytes"] = max(self.most["output_bytes"], call.output_bytes)
        self.most["growth"] = max(self.most["growth"], call.growth)
        self.most["widens"] = max(self.most["widens"], float(call.widens))
        self.most["pads"] = max(self.most["pads"], float(call.pads))
        self.most["random"] = max(self.most["random"], float(call.random))
        if call.seconds > self.longest_s:
            self.longest_s, self.shapes = call.seconds, call.shapes


class OperatorRun:
    """The profile of one rank: begun after the measured steps, written after the last step."""

    def __init__(self, optimizers: Iterable[Any], step_s: float, core_wait: float = 1.0) -> None:
        """Args:
        optimizers: Those that have stepped so far.
        step_s: Duration of a step without the profile, in seconds.
        core_wait: Factor by which waits for a core lengthen the computation of these steps.
        """
        self._step_s, self._core_wait = step_s, core_wait
        self._optimizers = optimizers
        self._profiler: OperatorProfiler | None = None
        self._device = "cpu"
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin the profile; called between two steps."""
        if torch.cuda.is_initialized():
            self._device = "cuda"
        self._cost = measure_dispatch(self._device)
        self._profiler = OperatorProfiler(self._device, self._optimized)
        self._profiler.start()

    def _optimized(self) -> set[int]:
        """Return the ids of all parameters of optimizers; none if they are shards (FSDP)."""
        parameters = parameters_of(*self._optimizers)
        plain = {type(parameter) for parameter in parameters} <= {torch.nn.Parameter, torch.Tensor}
        return set(map(id, parameters)) if plain else set()

    def after_step(self) -> bool:
        """End a profiled step; return whether it was the last one."""
        assert self._profiler is not None
        self._profiler.after_step()
        return len(self._profiler.steps) > PROFILED_STEPS

    def finish(self) -> dict[str, Any]:
        """End the profile; return the content of the file."""
        assert self._profiler is not None
        steps = self._profiler.stop()[PROFILE_WARM_UP:][:PROFILE_USED]
        correct_times(steps, self._cost, self._device)
        return {
            "version": FORMAT_VERSION,
            "steps": len(steps),
            "step_s": self._step_s,
            "core_wait": self._core_wait if self._device == "cpu" else 1.0,
            "profiled_step_s": sum(step.seconds for step in steps) / max(len(steps), 1),
            "device": self._device,
            "dispatch_s": self._cost.dispatch_s,
            "compiled": _is_compiled(),
            "failure": self._profiler.failure,
            "parameter_bytes": self._parameter_bytes(),
            "limits": measure_limits(self._device),
            **sum_rows(steps),
            "whole_s": time.perf_counter() - self._began,
        }

    def _parameter_bytes(self) -> dict[str, int]:
        """Return the bytes of the parameters that optimizers update, by dtype."""
        sizes: dict[str, int] = defaultdict(int)
        for parameter in parameters_of(*self._optimizers):
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
        return dict(sizes)


def _key(call: Call) -> tuple[Line, str, str, str, str]:
    return call.line, call.module, call.name, call.phase, call.copy


def _remove_stalls(steps: list[Step]) -> None:
    """Set the time of each call to its median over the steps, where steps have the same calls.

    A call that another program interrupts takes many times as long.
    """
    by_key: list[dict[Any, list[Call]]] = []
    for step in steps:
        by_key.append(defaultdict(list))
        for call in step.calls:
            by_key[-1][_key(call)].append(call)
    for key, calls in by_key[0].items() if by_key else ():
        each = [found.get(key, []) for found in by_key]
        if all(len(same) == len(calls) for same in each):
            for same in zip(*each, strict=True):
                seconds = statistics.median(call.seconds for call in same)
                for call in same:
                    call.seconds = seconds


def sum_rows(steps: list[Step]) -> dict[str, Any]:
    """Return the lines of the script and one row per operator; all sums are per step."""
    _remove_stalls(steps)
    rows: dict[tuple[Line, str, str, str, str], _Row] = defaultdict(_Row)
    for step in steps:
        for call in step.calls:
            rows[_key(call)].add(call)
    ordered = sorted(rows.items(), key=lambda item: -item[1].sums["seconds"])
    listed, rest = ordered[:MAX_ROWS], ordered[MAX_ROWS:]
    numbers: dict[Line, int] = {}
    count = max(len(steps), 1)
    found = [
        {
            "line": numbers.setdefault(line, len(numbers)),
            "module": module[:200],
            "operator": name[:100],
            "phase": phase,
            "copy": copy,
            "shapes": row.shapes[:200],
            **{key: value / count for key, value in row.sums.items()},
            **row.most,
        }
        for (line, module, name, phase, copy), row in listed
    ]
    lines = [
        {"file": line[0], "line": line[1], "function": line[2], "code": code_of(line)}
        for line in numbers
    ]
    left_out = sum(row.sums["seconds"] for _, row in rest) / count
    return {"lines": lines, "operators": found, "left_out_s": left_out}


def write_rows(ring: Path, content: dict[str, Any]) -> None:
    """Write the file beside a rank's ring."""
    write_json(ring.with_suffix(OPERATORS_SUFFIX), content)


def _is_compiled() -> bool:
    """Return whether the script runs code that torch.compile compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["stats"].get("unique_graphs"))


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
        known = [entry for tensor in tensors if (entry := self._known.get(id(tensor))) is not None]
        return [entry.producer for entry in known if entry.producer and not entry.ref.expired()]

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
        for output in tensors_in((out,)):
            self._store(output, self._number(tensor), producer, tensor)


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
            if tensor.dim() == IMAGE_DIMENSIONS and PAD not in {call.name for call in origins}:
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
