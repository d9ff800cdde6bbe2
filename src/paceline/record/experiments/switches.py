"""Parts of a rank that an experiment switches off and on while the script runs.

In a switched phase (rung.py) a part is off in some blocks of steps and on in the others, so that
slow changes of the machine affect both alike.
"""

import gc
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import thread as executor_threads
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..hooks.collective_in_flight import KEEPS_PYTHON_WORK
from ..hooks.collectives import METHODS
from ..hooks.taps import around
from ..pending_value import completed_future
from ..ring.stack_sampler import is_script, script_frame
from .lines.collective_calls import carries_objects, serves_checkpoint

MAX_COLLECTING_LINES = 50  # lines of the script for which the time of collections is kept
MIN_LOCATED_S = 1e-3  # a shorter automatic collection is not attributed to a line
POLL_INTERVAL_S = 0.01  # of a paused thread
MIN_PATIENCE_S = 0.5  # without a step, before the paused threads continue
PATIENCE_STEPS = 5.0  # the same, in durations of the longest step
# Files that are on the stack of a thread's function without holding a lock.
_STARTERS = (threading.__file__, executor_threads.__file__)


class Switch(ABC):
    """One part that can be switched off and on again."""

    @abstractmethod
    def off(self) -> None: ...

    @abstractmethod
    def on(self) -> None: ...

    def after_step(self) -> None:  # noqa: B027
        """Note the end of a step."""

    def results(self) -> dict[str, Any]:
        """Return what the record's header says of the phase."""
        return {}


class GarbageCollector(Switch):
    """Python's cyclic garbage collector: automatic collections, and calls of ``gc.collect``."""

    def __init__(self) -> None:
        self._is_off = self._was_enabled = False
        self._began = 0.0
        self._seconds, self._count = 0.0, 0
        self._lines: dict[tuple[str, int], float] = {}
        self._collect = gc.collect

    def install(self) -> None:
        """Observe collections. Must precede the script's imports from ``gc``."""
        around(gc, "collect", self._collect_unless_off)
        gc.callbacks.append(self._on_collection)
        os.register_at_fork(after_in_child=self._switch_on)  # a loader's worker

    def _collect_unless_off(self, collect: Callable[[int], int], generation: int = 2) -> int:
        return 0 if self._is_off else collect(generation)

    def off(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        self._is_off = True

    def on(self) -> None:
        """Switch on, and collect what remained, so that the next steps do not pay for it."""
        self._switch_on()
        self._collect()

    def _switch_on(self) -> None:
        if self._is_off and self._was_enabled:
            gc.enable()
        self._is_off = False

    def begin(self) -> None:
        """Start to measure the collections of a phase."""
        self._seconds, self._count = 0.0, 0
        self._lines.clear()

    def results(self) -> dict[str, Any]:
        """Return seconds and number of collections since ``begin``, and the line with most."""
        if not self._count:
            return {}
        found: dict[str, Any] = {"seconds": float(f"{self._seconds:.6g}"), "count": self._count}
        if self._lines:
            file, line = max(self._lines, key=self._lines.__getitem__)
            found |= {"file": file[-120:], "line": line}
        return {"collecting": found}

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        took = time.perf_counter() - self._began
        self._seconds += took
        self._count += 1
        if took < MIN_LOCATED_S:
            return
        if frame := script_frame(sys._getframe(1)):
            at = (frame.f_code.co_filename, frame.f_lineno)
            if at in self._lines or len(self._lines) < MAX_COLLECTING_LINES:
                self._lines[at] = self._lines.get(at, 0.0) + took


class BufferBroadcasts(Switch):
    """DDP's broadcasts of the buffers before a forward.

    All ranks switch after the same optimizer step, so that they call the same collectives.

    Args:
        models: Weak references to the DDP models of the rank.
    """

    def __init__(self, models: Sequence[weakref.ref[Any]]) -> None:
        self._models = models
        self._switched: list[Any] = []  # models without broadcasts at present
        self._count = 0

    def off(self) -> None:
        models = [model for ref in self._models if (model := ref()) is not None]
        self._switched = [x for x in models if x.broadcast_buffers and x.modules_buffers]
        for model in self._switched:
            model.broadcast_buffers = False
        self._count = max(self._count, len(self._switched))

    def on(self) -> None:
        for model in self._switched:
            model.broadcast_buffers = True
        self._switched = []

    def results(self) -> dict[str, Any]:
        """Return the number of models that broadcast buffers."""
        return {"broadcasting": self._count}


class ScriptThreads(Switch):
    """The Python threads of the script other than the training thread.

    A thread is paused by its trace function, between two lines of the script's own code. It does
    not hold the interpreter lock there, and no lock of a library. It may hold a lock of the script
    that the training thread wants: if no step ends for ``PATIENCE_STEPS`` steps, all threads
    continue, and the experiment is void. A lower priority or a core binding would not do: a thread
    without a core keeps the interpreter lock. Threads of libraries (also those of loaders) and of
    Paceline are never paused.
    """

    def __init__(self, training_thread: Callable[[], int]) -> None:
        self._training_thread = training_thread
        self._is_off = False
        self._gave_up = False
        self._paused: set[int] = set()
        self._resume = threading.Event()
        self._step_end = time.monotonic()
        self._longest_step_s = 0.0

    def install(self) -> None:
        """Give threads that start from now on a trace function, unless a debugger does."""
        if threading.gettrace() is None:
            threading.settrace(self._on_call)

    def off(self) -> None:
        self._resume.clear()
        self._is_off = not self._gave_up
        for thread, frame in sys._current_frames().items():
            if self._is_off and thread != self._training_thread():
                self._trace_lines(frame)

    def on(self) -> None:
        self._is_off = False
        self._resume.set()

    def after_step(self) -> None:
        end = time.monotonic()
        if not self._is_off:
            self._longest_step_s = max(self._longest_step_s, end - self._step_end)
        self._step_end = end

    def results(self) -> dict[str, Any]:
        """Return the number of paused threads, and whether the training needed one of them."""
        return {"paused": len(self._paused), "gave_up": self._gave_up}

    def _trace_lines(self, frame: FrameType | None) -> None:
        """Let a thread call ``_on_line``, if it has a trace function and none of its own."""
        while frame is not None:
            if is_script(frame.f_code) and frame.f_trace is None:
                frame.f_trace = self._on_line
            frame = frame.f_back

    def _on_call(self, frame: FrameType, *_: Any) -> Any:
        return self._on_line if self._is_off and is_script(frame.f_code) else None

    def _on_line(self, frame: FrameType, *_: Any) -> Any:
        if self._is_off and self._may_pause(frame):
            self._paused.add(threading.get_ident())
            while self._is_off and not self._is_needed():
                self._resume.wait(POLL_INTERVAL_S)
        if not self._is_off:
            frame.f_trace = None  # the next lines are not traced
        return None

    def _may_pause(self, frame: FrameType) -> bool:
        if threading.get_ident() == self._training_thread():
            return False
        above = frame.f_back
        while above is not None:
            if not is_script(above.f_code) and above.f_code.co_filename not in _STARTERS:
                return False
            above = above.f_back
        return True

    def _is_needed(self) -> bool:
        patience = max(MIN_PATIENCE_S, PATIENCE_STEPS * self._longest_step_s)
        if time.monotonic() - self._step_end > patience:
            self._gave_up, self._is_off = True, False
            self._resume.set()
        return self._gave_up


class ContiguousFormat(Switch):
    """The contiguous memory format of convolution weights and of cached images.

    Args:
        convolutions: Weak references to the layers.
        batches: The ``CachedBatches``, whose images get the same format.
    """

    def __init__(self, convolutions: Sequence[Any], batches: Any) -> None:
        self._convolutions, self._batches = convolutions, batches

    def off(self) -> None:
        self._set(torch.channels_last)

    def on(self) -> None:
        self._set(torch.contiguous_format)

    def _set(self, memory_format: Any) -> None:
        for ref in self._convolutions:
            if (layer := ref()) is not None:
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)

        def convert(leaf: Any) -> Any:
            fits = hasattr(leaf, "dim") and leaf.dim() == 4
            return leaf.contiguous(memory_format=memory_format) if fits else leaf

        self._batches.convert = convert


# Make a script that computes in float64 compute in float32, to measure what float64 costs.
#
# Every way in which scripts usually ask for float64 gives float32. A script that asks in another
# way, or that needs the range of float64, may fail; the experiment is then left out.


def use_single_precision(torch: Any) -> None:
    """Patch ``torch``; must precede the script's own use of it."""
    double, single = torch.float64, torch.float32
    torch.float64 = torch.double = single
    torch.Tensor.double, torch.nn.Module.double = torch.Tensor.float, torch.nn.Module.float

    def narrowed(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if made.dtype != double:
            return made
        return made.detach().to(single).requires_grad_(made.requires_grad)

    for name in ("tensor", "as_tensor", "asarray", "from_numpy"):
        around(torch, name, narrowed)

    def set_default_dtype(set_default: Callable[[Any], None], dtype: Any) -> None:
        set_default(single if dtype == double else dtype)

    around(torch, "set_default_dtype", set_default_dtype)


# A process group whose collectives move no data, to measure a step without communication.
#
# Outputs hold this rank's own inputs, so that later computations find values of the right shape and
# dtype. PyTorch's ``FakeProcessGroup`` fills them. Its futures hold no value, which DDP needs, so
# they are replaced. Python objects that only one rank has are sent all the same, because the other
# ranks could not unpickle anything else; so is all that torch.distributed.checkpoint sends, because
# its ranks plan a checkpoint together. Received tensors hold zeros: what was in their memory before
# may be infinite, and end the training.

RECEIVES = ("recv", "recv_anysource")

# Work objects to keep alive, which C++ does not do before PyTorch 2.9. Each one keeps its tensors,
# whose memory a training would have freed and reused.
MAX_HELD_WORKS = 0 if KEEPS_PYTHON_WORK else 64


class NoCommunicationGroup:
    """A stand-in for ``inner`` that replaces its collectives and delegates everything else."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        self._inner = inner
        self._held_works: list[dist.Work] = []
        self._fake = dist.ProcessGroup(c10d.HashStore(), inner.rank(), inner.size())
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._fake._set_default_backend(kind)
        untyped: Any = c10d  # its stub lacks FakeProcessGroup
        backend = untyped.FakeProcessGroup._create_internal(inner.rank(), inner.size())
        for device in inner._device_types:
            self._fake._register_backend(device, kind, backend)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            return getattr(self._inner, name)
        caller = sys._getframe(1)
        if name in ("broadcast", "scatter") and carries_objects(caller):
            return getattr(self._inner, name)
        if serves_checkpoint(caller):
            return getattr(self._inner, name)
        method = getattr(self._fake, name)
        return self._with_future_value(_filling(method) if name in RECEIVES else method)

    def _with_future_value(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> dist.Work | None:
            if method(*args, **options) is None:
                return None
            future = completed_future(args[0] if args else None)
            untyped: Any = c10d
            work: dist.Work = untyped._create_work_from_future(future)
            if MAX_HELD_WORKS:
                self._held_works = [*self._held_works[-MAX_HELD_WORKS:], work]
            return work

        return call

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Return at once, without waiting for other ranks."""


def _filling(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Return a receive that fills its tensors: integers, such as flags of gradients, with ones."""

    def filled(tensors: list[torch.Tensor], *args: Any) -> Any:
        for tensor in tensors:
            tensor.detach().fill_(0 if tensor.is_floating_point() else 1)
        return receive(tensors, *args)

    return filled
