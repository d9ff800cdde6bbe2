"""A strategy: how some axes of a layout divide a model."""

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
    """How a model is to be distributed.

    Attributes:
        layout: The layout, with the extents that were asked for.
        mesh: The ranks; arranged for the layout when a strategy is applied.
        device: Where this rank computes.
        blocks: Names of modules or classes that form blocks; None to find them.
        options: Further arguments of ``world.distribute``.
        example_inputs: Arguments of a forward, whose shapes and dtypes matter; None if unknown.
        say: Prints a line on rank 0.
        note: Writes fields of the record's header.
        compare: Whether operations on parts are compared with whole ones before the first step.
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
    """Division of one model along some axes.

    ``parallel/distribute.py`` lists the strategies in the order in which they are applied.

    Attributes:
        axes: The keywords of ``Layout`` whose extents it divides.
    """

    axes: ClassVar[frozenset[str]]

    def __init__(self, request: DistributionRequest) -> None:
        self.request = request

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        """Return whether a layout needs this strategy."""
        return any(layout.extents[axis] != 1 for axis in cls.axes)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Raise ValueError for a model or an optimizer that can't be divided.

        It is called before anything is changed, on any number of ranks.
        """
        return

    def defers(self, model: nn.Module) -> bool:
        """Return whether ``apply`` computes the tensors of a model of ``world.deferred()``.

        Otherwise they are computed before. Collective.
        """
        return False

    @abstractmethod
    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        """Divide the model over the ranks of the mesh, and return it. Collective.

        Parameters of the optimizer that are replaced must be replaced in it as well.
        """
