"""The arguments of ``world.distribute`` that say how a model is divided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cost.layout import HOST, Layout
from ...knobs.layout import requested_layout
from ...parallel.sharded.layouts import (
    FULLY_SHARD_OPTIONS,
    ShardingRequest,
    parse_layout,
    parse_request,
    with_arguments,
)


@dataclass(frozen=True)
class LayoutArguments:
    """The arguments as the script gives them.

    Attributes:
        device: Type of the device on which the rank computes.
    """

    layout: str | Layout
    device: str
    blocks: Sequence[str] | None
    shard_over: str
    offload: str | None
    recompute: str | None
    memory_budget: float | None
    options: dict[str, Any]

    def of_settings(self) -> "LayoutArguments":
        """Return the arguments with the layout of the settings (``paceline run --settings``).

        What it does not have of the script's arguments is left out.
        """
        requested = requested_layout()
        if requested is None:
            return self
        shards = bool(requested.zero)
        has = [name for name in self.options if (name in FULLY_SHARD_OPTIONS) == shards]
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

    def request(self, layout: Layout) -> ShardingRequest | None:
        """Return how the model would be sharded in a layout; None for replicas.

        Raises:
            ValueError: The layout does not have one of the arguments.
        """
        return parse_request(self.merged(layout), self.blocks, self.device, self.options)

    @property
    def is_per_node(self) -> bool:
        """Whether each node holds a replica."""
        known = self.known
        return self.shard_over == HOST or (known is not None and known.shards == HOST)


def check_ranks(layout: Layout, ranks: int) -> None:
    """Raise ValueError for a layout that does not fit the number of ranks."""
    try:
        layout.over(ranks)
    except ValueError as error:
        raise ValueError(f"world.distribute: {error}") from None
