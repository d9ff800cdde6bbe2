"""A model that is divided over the tensor axis, as its comparison with the whole one sees it.

Meanwhile the operations are compared one by one (``comparison``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..comparison.model_comparison import Division
from ..divided.divided_tensor import whole_outputs
from ..memory_budget import GIB, available_bytes
from .comparison import Comparison, axis_device_of
from .parameters import Views
from .split_tensor import Watch, watching

MEMORY_FACTOR = 3  # whole parameters, their gradients, and activations


class TensorDivision(Division):
    """One forward of a model whose operators are divided.

    Args:
        forward: Runs the model's forward.

    Attributes:
        operations: The comparison of operations.
    """

    subject = "the model that is divided over the tensor axis"
    cause = (
        "Each operation by itself was right, so code of the model uses a part as if it were whole. "
        "HINT: the rule 'replicate' for the layers around it, in paceline.Layout(rules={...})"
    )

    def __init__(self, model: nn.Module, views: Views, forward: Callable[[], Any]) -> None:
        self.model, self.views, self.forward = model, views, forward
        self.axis = views.axis
        self.device = axis_device_of(self.axis)
        self.operations = Comparison()

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.axis.pieces(tensor)

    def divided(self) -> Any:
        with watching(self.operations):
            return whole_outputs(self.forward())

    def whole(self) -> Any:
        return whole_outputs(self.forward())

    @contextmanager
    def as_whole(self, takes_gradients: bool) -> Iterator[None]:
        with watching(Watch()):
            if takes_gradients:
                with self.views.whole_tensors():
                    yield
                return
            self.views.are_whole = True  # FSDP gives modules their parameters itself
            try:
                yield
            finally:
                self.views.are_whole = False

    def is_split(self, parameter: nn.Parameter) -> bool:
        return getattr(parameter, "_paceline_split", None) is not None

    def mean_magnitude(self, parameter: nn.Parameter) -> torch.Tensor:
        own = super().mean_magnitude(parameter)
        return self.axis.sum(own) / self.axis.size if self.is_split(parameter) else own

    @property
    def rank(self) -> int:
        return self.axis.rank

    def why_not(self) -> str:
        tensors = [*self.model.parameters()]
        device = next((p.device for p in tensors), torch.device("cpu"))
        needed = sum(p.nbytes * (self.axis.size if self.is_split(p) else 1) for p in tensors)
        missing = MEMORY_FACTOR * needed > available_bytes(device)
        flag = torch.tensor([float(missing)], device=self.device)
        if not any(float(one) for one in self.pieces(flag)):
            return ""
        return f"its whole parameters ({needed / GIB:.1f} GiB) do not fit on a rank"
