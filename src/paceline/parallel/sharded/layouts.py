"""What a sharded layout asks of ``fully_shard``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cost.layout import Layout

OLDEST_TESTED = "2.11"  # version whose fully_shard equals one process in the tests
FULLY_SHARD_OPTIONS = ("mp_policy",)  # passed on to fully_shard


@dataclass(frozen=True)
class ShardingRequest:
    """The arguments of ``world.distribute`` that concern sharding.

    Attributes:
        layout: The layout, which shards.
        blocks: Names of modules or classes; None to find the blocks.
        options: Those of ``fully_shard``.
    """

    layout: Layout
    blocks: Sequence[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The sharding level, for messages: "zero3"."""
        return f"zero{self.layout.zero}"

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a block's whole parameters are freed between its forward and its backward, and
        gathered twice in a step.
        """
        return self.layout.zero == 3

    @property
    def shards_accumulated_gradients(self) -> bool:
        """Whether each backward of an accumulation reduces and shards its gradients.

        Otherwise whole gradients are kept on each rank, and exchanged once.
        """
        return self.layout.zero >= 2


def parse_request(
    layout: Layout, blocks: Sequence[str] | None, device: str, options: dict[str, Any]
) -> ShardingRequest:
    """Return the request of a sharded layout.

    Args:
        device: Type of the device on which the rank computes.

    Raises:
        ValueError: An option that the layout does not have.
    """
    request = ShardingRequest(layout, blocks, options)
    if layout.shards is not None and layout.divided_axes:
        raise ValueError(
            f"world.distribute: layout={str(layout)!r}: shards on a part of the data ranks are not "
            f"implemented together with {layout.divided_axes[0]} yet. HINT: {request.name}, "
            f"without /{layout.shards}"
        )
    for name in options:
        if name not in FULLY_SHARD_OPTIONS:
            reason = (
                "parameters without a gradient need no option there"
                if name == "find_unused_parameters"
                else "its options are blocks, shard_over, offload and mp_policy"
            )
            raise ValueError(
                f"world.distribute: layout={request.name!r} does not have the option {name}: "
                f"{reason}. HINT: leave {name} out, or layout='data'"
            )
    if torch.__version__ < OLDEST_TESTED:
        raise ValueError(
            f"world.distribute: layout={request.name!r} needs PyTorch {OLDEST_TESTED} or later; "
            f"this is {torch.__version__}. HINT: pip install -U torch, or layout='data'"
        )
    if layout.offload == "parameters" and device == "cpu":
        raise ValueError(
            "world.distribute: offload='parameters' moves shards from a GPU to the host's memory, "
            "and this rank computes on the CPU. HINT: leave offload out"
        )
    return request
