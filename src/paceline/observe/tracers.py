"""Trace the user's code: the lines that change a state, and the operators of the first step."""

import sys
import zlib
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..record.hooks.taps import on_step
from .facts.events import OperatorFacts
from .observation import Observation
from .user_lines import is_users_file, line_of, user_line, users_frames

States = Mapping[str, Any]


class LineTracer:
    """Compares a state after each executed line of the user's code.

    A debugger or a coverage tool that traces lines already prevents it.

    Args:
        states: Returns the parts of the state by name. A part that is not there did not change.
        changed: Called with the name of a part, the line that has changed it, and the line of the
            function in which the tracer was started that ran then.
        max_events: Lines that are looked at between ``start`` and ``stop``.
    """

    def __init__(
        self,
        states: Callable[[], States],
        changed: Callable[[str, str, str], None],
        max_events: int,
    ) -> None:
        self._states, self._changed, self._max_events = states, changed, max_events
        self._last: States = {}
        self._line = self._site = ""
        self._code: CodeType | None = None  # of the function in which the tracer was started
        self._frames: list[FrameType] = []
        self.is_running = False
        self.events = 0  # since the last start

    def start(self) -> bool:
        """Begin to look; return whether this was possible."""
        if self.is_running or sys.gettrace() is not None:
            return False
        self.is_running, self.events = True, 0
        self._last, self._line, self._code = self._states(), "", None
        for frame in users_frames():
            self._line = self._line or line_of(frame)
            self._code = self._code or frame.f_code
            frame.f_trace = self._in_frame
            self._frames.append(frame)
        self._site = self._line
        sys.settrace(self._on_call)
        return True

    def stop(self) -> None:
        """End to look, after a last comparison."""
        if not self.is_running:
            return
        sys.settrace(None)
        for frame in self._frames:
            frame.f_trace = None
        self._frames.clear()
        self._compare()
        self.is_running = False

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_users_file(frame.f_code.co_filename):
            return None
        self._compare()  # the caller may have changed it for its arguments
        self._line = line_of(frame)
        return self._in_frame

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return") and self.is_running:
            self._compare()
            running = users_frames(frame if event == "line" else frame.f_back)
            self._line = next(map(line_of, running), self._line)
            if frame.f_code is self._code:
                self._site = self._line
            self.events += 1
            if self.events > self._max_events:
                self.stop()
                return None
        return self._in_frame

    def _compare(self) -> None:
        states = self._states()
        for name, state in states.items():
            if self._line and self._last.get(name, state) != state:
                self._changed(name, self._line, self._site)
        self._last = states


# List the operators of the first step, with checksums of their results.
#
# Two runs with the same batches and parameters have the same list, unless the script is not
# deterministic. The first entry that differs is the operator whose result does, or whose input
# comes from outside of torch.

MAX_OPERATORS = 20_000
MAX_BYTES = 1 << 20  # of a result; the rest is not read
_UNDEFINED = ("empty", "resize", "set_")  # parts of names of operators that return any values


class OperatorTrace:
    """The trace of the operators from the first training forward to the first optimizer step.

    Args:
        observation: Receives the facts.
        end: Ends the run after the step; it does not return.
    """

    def __init__(self, observation: Observation, end: Callable[[], None]) -> None:
        self._observation, self._end = observation, end
        self._mode: Any = None

    def install(self) -> None:
        """Register hooks for the first forward and the first step."""
        nn.modules.module.register_module_forward_pre_hook(self._begin)
        on_step(before=self._stop)

    # Not guarded: within Observation.guarded, modes are switched off.

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        is_first = self._mode is None and self._observation.is_observed
        if is_first and torch.is_grad_enabled() and self._observation.facts.batches:
            self._mode = _Mode(self._observation.facts.operators)
            self._mode.__enter__()

    def _stop(self, *_: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._end()


class _Mode(TorchDispatchMode):
    """Adds each operator to a list."""

    def __init__(self, operators: list[OperatorFacts]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        name = str(func).rpartition(".")[0]
        if len(self._operators) < MAX_OPERATORS and not any(x in name for x in _UNDEFINED):
            self._operators.append(OperatorFacts(name, user_line(), _checksum(result)))
        return result


def _checksum(result: Any) -> int:
    """Return a checksum of the first tensor of a result."""
    tensor = next((one for one in tree_leaves(result) if isinstance(one, torch.Tensor)), None)
    if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_sparse:
        return 0
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    values = tensor.detach().reshape(-1)[: MAX_BYTES // max(tensor.element_size(), 1)]
    return zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().tobytes())
