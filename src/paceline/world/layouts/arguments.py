"""The arguments of ``world.distribute`` that say how a model is divided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...cost.layout import HOST, Layout
from ...knobs.layouts.pipelines import with_pipeline_settings
from ...knobs.layouts.requested import requested_layout
from ...parallel.distribute import strategies_for
from ...parallel.memory.setup import ModelSetup
from ...parallel.mesh import Mesh
from ...parallel.pipeline.strategy import PIPELINE_OPTIONS
from ...parallel.sharded.layouts import FULLY_SHARD_OPTIONS
from ...parallel.strategy.layout_arguments import parse_layout, with_arguments
from ...parallel.strategy.parallel_strategy import DistributionRequest


@dataclass(frozen=True)
class LayoutArguments:
    """The arguments as the script gives them.

    Attributes:
        device: The device on which the rank computes.
        compare: Whether operations on parts are compared with whole ones.
    """

    layout: str | Layout
    mesh: Mesh
    device: torch.device
    blocks: Sequence[str] | None
    shard_over: str
    offload: str | None
    recompute: str | None
    memory_budget: float | None
    options: dict[str, Any]
    compare: bool = True

    def of_settings(self) -> "LayoutArguments":
        """Return the arguments with the layout of the settings (``paceline run --settings``).

        What it does not have of the script's arguments is left out. Settings of pipelines change
        its options.
        """
        requested = requested_layout()
        found = self if requested is None else self._in_place_of_script(requested)
        layout = parse_layout(found.layout)
        if layout is None:
            return found
        layout, options = with_pipeline_settings(layout, found.options)
        return replace(found, layout=layout, options=options)

    def _in_place_of_script(self, requested: Layout) -> "LayoutArguments":
        shards = bool(requested.zero)
        kind = "shards" if shards else "pipeline" if requested.pp != 1 else "replicas"
        has = [name for name in self.options if _kind_of_option(name) == kind]
        return replace(
            self,
            layout=requested,
            blocks=self.blocks if shards else None,
            shard_over="job",
            offload=None,
            recompute=None,
            memory_budget=self.memory_budget if requested.recompute == "auto" else None,
            options={name: self.options[name] for name in has},
        )

    @property
    def known(self) -> Layout | None:
        """The layout with all arguments; None for "auto"."""
        layout = parse_layout(self.layout)
        return None if layout is None else self.merged(layout)

    def merged(self, layout: Layout) -> Layout:
        """Return a layout with the script's other arguments."""
        return with_arguments(layout, self.shard_over, self.offload, self.recompute)

    def request(self, layout: Layout) -> DistributionRequest:
        """Return how the model would be distributed in a layout."""
        merged = self.merged(layout)
        about = (self.mesh, self.device, self.blocks, self.options)
        return DistributionRequest(merged, *about, compare=self.compare)

    def check(self, layout: Layout, setup: ModelSetup) -> None:
        """Raise ValueError where the model or an argument does not fit a layout."""
        for strategy in strategies_for(self.request(layout)):
            strategy.check(setup.model, setup.optimizer)

    @property
    def is_per_node(self) -> bool:
        """Whether each node holds a replica."""
        known = self.known
        return self.shard_over == HOST or (known is not None and known.shards == HOST)


def _kind_of_option(name: str) -> str:
    """Return which layouts have an option."""
    if name in PIPELINE_OPTIONS:
        return "pipeline"
    return "shards" if name in FULLY_SHARD_OPTIONS else "replicas"


def check_ranks(layout: Layout, ranks: int) -> None:
    """Raise ValueError for a layout that does not fit the number of ranks."""
    try:
        layout.over(ranks)
    except ValueError as error:
        raise ValueError(f"world.distribute: {error}") from None


def check_norm(layout: Layout, norm: str) -> None:
    """Raise ValueError for a batch normalization that a layout does not support."""
    if norm == "sync" and layout.divided_axes:
        raise ValueError(
            f"world.distribute: norm='sync' is not implemented together with "
            f"{layout.divided_axes[0]} yet. HINT: norm='local'"
        )
