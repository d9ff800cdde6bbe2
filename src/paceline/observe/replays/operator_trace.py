"""List the operators of the first step, with checksums of their results.

Two runs with the same batches and parameters have the same list, unless the script is not
deterministic. The first entry that differs is the operator whose result does, or whose input comes
from outside of torch.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...record.hooks.taps import on_step
from ..facts.events import OperatorFacts
from ..observation import Observation
from ..user_lines import user_line

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
