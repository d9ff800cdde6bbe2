"""Where in the user's script, and in which module of the model, an operator was called."""

import linecache
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...hooks.sampled_steps import tensors_in
from ...ring.stack_sampler import LIBRARY_PREFIXES

MAX_CODE_CHARACTERS = 120  # of a line of the script
_BACKWARD = "_engine_run_backward"  # the function of torch from which operators of a backward come
_USER, _OPTIMIZER, _CHECKPOINT, _ENGINE, _LIBRARY = range(5)  # kinds of files on the stack
Line = tuple[str, int, str]  # file, number, function
NO_LINE: Line = ("", 0, "")


class CallSites:
    """Finder of the script's line on the Python stack; remembers what kind each file is."""

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}

    def find(self) -> tuple[Line, bool, bool]:
        """Return the innermost line of the script that leads to the calling operator.

        Also return whether an optimizer is on the stack below that line, and whether activation
        checkpointing is. In a backward, only lines that run within it count.
        """
        frame: FrameType | None = sys._getframe(2)
        optimizer = checkpoint = False
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code.co_filename)
            if kind is None:
                kind = self._kinds[code.co_filename] = _kind(code.co_filename)
            if kind == _USER:
                checkpoint = checkpoint or self._recomputes(frame.f_back)
                return (code.co_filename, frame.f_lineno, code.co_name), optimizer, checkpoint
            if kind == _ENGINE and code.co_name == _BACKWARD:
                break
            optimizer |= kind == _OPTIMIZER
            checkpoint |= kind == _CHECKPOINT
            frame = frame.f_back
        return NO_LINE, optimizer, checkpoint

    def _recomputes(self, frame: FrameType | None) -> bool:
        """Return whether activation checkpointing called this frame within a backward."""
        checkpoint = False
        while frame is not None:
            kind = self._kinds.get(frame.f_code.co_filename)
            if kind == _ENGINE and frame.f_code.co_name == _BACKWARD:
                return checkpoint
            checkpoint |= kind == _CHECKPOINT
            frame = frame.f_back
        return False


def _kind(file: str) -> int:
    if not file.startswith(LIBRARY_PREFIXES):
        return _USER
    for end, kind in (
        ("/torch/utils/checkpoint.py", _CHECKPOINT),
        ("/torch/autograd/graph.py", _ENGINE),
    ):
        if file.endswith(end):
            return kind
    return _OPTIMIZER if "/torch/optim/" in file else _LIBRARY


def code_of(line: Line) -> str:
    """Return the text of a line of the script."""
    return linecache.getline(line[0], line[1]).strip()[:MAX_CODE_CHARACTERS]


class ModuleStack:
    """Names of the modules that are being called; hooks on all modules note them.

    Attributes:
        padding: Share of the inputs of the outermost module that is padding.
        evaluates: Whether the outermost module is in evaluation mode, without gradients.
    """

    def __init__(self, padding_of: Callable[[Any], float | None]) -> None:
        """``padding_of``: returns the padded share of the inputs of a module; None if it has no
        inputs that may be padded.
        """
        self.padding: float | None = None
        self.evaluates = False
        self._padding_of = padding_of
        self._names: dict[int, str] = {}
        self._stack: list[tuple[str, bool]] = []  # name, and whether it is a recurrent layer
        self._handles: list[Any] = []

    def install(self) -> None:
        module = torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def current(self) -> str:
        """Name of the innermost module, as in ``named_modules``; empty outside of all modules."""
        return self._stack[-1][0] if self._stack else ""

    @property
    def is_recurrent(self) -> bool:
        """Whether a recurrent layer of PyTorch runs, which calls operators for each position."""
        return bool(self._stack) and self._stack[-1][1]

    def _enter(self, module: Any, inputs: Any) -> None:
        if not self._stack:
            self.evaluates = not module.training and not torch.is_grad_enabled()
        if not self._stack and id(module) not in self._names:
            for name, part in module.named_modules():
                known = f"{type(module).__name__}.{name}" if name else type(module).__name__
                self._names.setdefault(id(part), known)
        name = self._names.get(id(module), type(module).__name__)
        self._stack.append((name, isinstance(module, torch.nn.RNNBase)))
        if self.padding is None:
            self.padding = self._padding_of(inputs)

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if not self._stack:
            self.padding, self.evaluates = None, False


# Padding in the inputs of a model: values at the end of samples that are all the same.


MAX_ELEMENTS = 1 << 24  # of a tensor that is inspected


def padded_share(inputs: Any) -> tuple[torch.Tensor | None, float]:
    """Return the largest tensor of a module's inputs, and the share of it that is padding.

    Padding is the same value at the end of a sample. Samples are sequences: tokens of shape (batch,
    length), or vectors (batch, length, features). Of other tensors, only what all samples have at
    the end of one of the last two dimensions counts.
    """
    candidates = [tensor for tensor in tensors_in(inputs) if _may_be_padded(tensor)]
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
