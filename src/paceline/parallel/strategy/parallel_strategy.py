"""Base class of the strategies, each of which divides a model along some axes of a layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ...cost.layout import Layout
from ..mesh import Mesh
from .distributed_model import DistributedModel


@dataclass(frozen=True)
class DistributionRequest:
    """Arguments with which a model is distributed.

    Attributes:
        layout: Requested layout.
        mesh: Mesh of the ranks. It must be arranged for the layout only when
            ``ParallelStrategy.apply`` is called.
        device: Device of this rank.
        blocks: Names of modules or classes that form blocks; None to find them automatically.
        options: Further keyword arguments of ``world.distribute``.
        example_inputs: Arguments of a forward, of which only shapes and dtypes are used; None if
            unknown.
        compare: Whether the results of divided operations are compared with those of undivided
            ones before the first step.
        say: Function that prints a line on rank 0.
        note: Function that writes its keyword arguments to the header of the record.
    """

    layout: Layout
    mesh: Mesh
    device: torch.device
    blocks: Sequence[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    example_inputs: Any = None
    compare: bool = True
    say: Callable[[str], None] = lambda _: None
    note: Callable[..., None] = lambda **_: None


class ParallelStrategy(ABC):
    """Divides one model along some axes of a layout.

    ``parallel/distribute.py`` lists the strategies in the order in which they are applied.

    Attributes:
        axes: Keys of ``Layout.extents`` along which the strategy divides a model.
    """

    axes: ClassVar[frozenset[str]]

    def __init__(self, request: DistributionRequest) -> None:
        self.request = request

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        """Return whether a layout needs this strategy."""
        return any(layout.extents[axis] != 1 for axis in cls.axes)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Check that the model and the optimizer can be divided.

        ``distribute_model`` calls it before any strategy changes the model, also with one rank.

        Raises:
            ValueError: The model or the optimizer can't be divided.
        """
        return

    def defers(self, model: nn.Module) -> bool:
        """Return whether ``apply`` initializes the tensors of a model of ``world.deferred()``.

        Otherwise ``distribute_model`` initializes them before ``apply``. Collective.
        """
        return False

    @abstractmethod
    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        """Divide the model over the ranks of the mesh, and return it. Collective.

        A strategy that replaces parameters of the model must also replace them in the optimizer.
        """
