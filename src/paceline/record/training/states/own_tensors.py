"""Find tensors in the script's objects that may be states of the training: queues, centers, sums.

Models, their averaged copies, datasets and batches are none of these. Modules without parameters
are: losses that keep a state in buffers.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import Dataset

from ..facts.models import StateFacts
from ..observation import Observation
from ..optimization.models import Models
from ..user_lines import user_line
from .averages import users_variables

MIN_ELEMENTS, MAX_ELEMENTS = 4, 1 << 20
MAX_TENSORS = 8


class OwnTensors:
    """The tensors of this script's objects.

    Args:
        observation: Receives the facts.
        models: Make rows of tensors.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self.lines: dict[str, list[str]] = {}  # that change a tensor, by name
        self._watched: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """Add the values of all tensors that are found now."""
        buffers = self._buffers()
        for name, tensor in (self._found() | buffers).items():
            row = self._models.add_row(tensor)
            if row is not None:
                step, rows = self._observation.step, {name: row}
                kind = "buffer" if name in buffers else "tensor"
                state = StateFacts(kind, name, user_line(), step, rows=rows)
                state.changed_by = list(self.lines.get(name, []))
                self._observation.facts.states.append(state)

    def watch(self) -> None:
        """Find the tensors whose changes are looked at; later calls do nothing."""
        if not self._watched:
            self._watched = self._found() | self._buffers()

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are looked at."""
        yield from self._watched.items()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the script's modules that have no parameters."""
        found: dict[str, torch.Tensor] = {}
        for name, value, _ in users_variables():
            if not isinstance(value, nn.Module) or any(True for _ in value.parameters()):
                continue
            for inner, buffer in value.named_buffers():
                if _is_state(buffer) and len(found) < MAX_TENSORS:
                    found.setdefault(f"{name}.{inner}", buffer)
        return found

    def _found(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value, owner in users_variables():
            if owner is None or isinstance(owner, Dataset) or not isinstance(value, torch.Tensor):
                continue
            if type(owner) in self._observation.batch_types:
                continue
            if _is_state(value):
                found.setdefault(name, value)
            if len(found) == MAX_TENSORS:
                break
        return found


def _is_state(tensor: torch.Tensor) -> bool:
    is_constant = not tensor.is_floating_point() or tensor.requires_grad
    return not is_constant and MIN_ELEMENTS <= tensor.numel() <= MAX_ELEMENTS
