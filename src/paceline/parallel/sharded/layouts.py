"""The arguments of ``world.distribute`` that concern the layout."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...cost.layout import AXIS_WORDS, HOST, OFFLOADS, Layout

AUTO = "auto"  # the fastest layout that fits
SHARD_OVER = ("job", HOST)
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


def parse_layout(layout: str | Layout) -> Layout | None:
    """Return the value of ``layout``; None for "auto".

    Raises:
        ValueError: It is no layout.
    """
    if layout == AUTO:
        return None
    if isinstance(layout, Layout):
        return layout
    try:
        return Layout.parse(layout)
    except ValueError as error:
        raise ValueError(f"world.distribute: {error}") from None


def with_arguments(
    layout: Layout, shard_over: str, offload: str | None, recompute: str | None
) -> Layout:
    """Return the layout with the arguments that it has as well.

    Raises:
        ValueError: An unknown value, one that the layout does not have, or one that contradicts
            the layout.
    """
    _check_value("shard_over", shard_over, SHARD_OVER)
    _check_value("offload", offload, (None, *OFFLOADS))
    if shard_over == HOST and not layout.zero:
        raise _needs_sharding("shard_over", shard_over, layout)
    if offload == "parameters" and not layout.zero:
        raise _needs_sharding("offload", offload, layout)
    given = {
        "shards": HOST if shard_over == HOST else None,
        "offload": offload,
        "recompute": recompute,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if getattr(layout, name) not in (None, value):
            argument = "shard_over" if name == "shards" else name
            raise ValueError(
                f"world.distribute: {argument}={value!r} contradicts layout={str(layout)!r}. "
                f"HINT: leave {argument} out"
            )
    changes: dict[str, Any] = given
    return replace(layout, **changes)


def parse_request(
    layout: Layout, blocks: Sequence[str] | None, device: str, options: dict[str, Any]
) -> ShardingRequest | None:
    """Return the request of a sharded layout, and None for one of replicas.

    Args:
        device: Type of the device on which the rank computes.

    Raises:
        ValueError: An option that the layout does not have, or an axis that nothing divides yet.
    """
    if layout.divided_axes:
        axis, text = layout.divided_axes[0], str(layout.without_options)
        raise ValueError(
            f"world.distribute: layout={text!r}: {axis} ({AXIS_WORDS[axis]}) is not implemented "
            "yet. HINT: layout='zero3', or layout='data'"
        )
    if not layout.zero:
        if blocks is not None:
            raise _needs_sharding("blocks", blocks, layout)
        return None
    request = ShardingRequest(layout, blocks, options)
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


def _needs_sharding(name: str, value: Any, layout: Layout) -> ValueError:
    return ValueError(
        f"world.distribute: {name}={value!r} needs a layout that shards, and layout is "
        f"{str(layout.without_options)!r}. HINT: layout='zero3', or leave {name} out"
    )


def _check_value(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        texts = [str(one) for one in allowed]
        near = difflib.get_close_matches(str(value), texts, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"world.distribute: {name} must be one of {', '.join(map(repr, allowed))}; this is "
            f"{value!r}. HINT: {name}={allowed[texts.index(near)]!r}"
        )
