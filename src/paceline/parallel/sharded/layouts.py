"""What each layout shards, and the values that ``world.distribute`` accepts for it."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

AUTO = "auto"  # the fastest layout that fits
SHARD_OVER = ("job", "host")
OFFLOADS = (None, "optimizer", "parameters")
OLDEST_TESTED = "2.11"  # version whose fully_shard equals one process in the tests
FULLY_SHARD_OPTIONS = ("mp_policy",)  # passed on to fully_shard


@dataclass(frozen=True)
class ShardedLayout:
    """One of PyTorch's ways to shard a model by ``fully_shard``.

    Attributes:
        name: Value of ``layout`` in ``world.distribute``.
        reshards_after_forward: Whether a block's whole parameters are freed between its forward
            and its backward, and gathered twice in a step.
        shards_accumulated_gradients: Whether each backward of an accumulation reduces and shards
            its gradients. Otherwise whole gradients are kept on each rank, and exchanged once.
    """

    name: str
    reshards_after_forward: bool
    shards_accumulated_gradients: bool


LAYOUTS = {
    layout.name: layout
    for layout in (
        ShardedLayout("zero1", False, False),
        ShardedLayout("zero2", False, True),
        ShardedLayout("zero3", True, True),
    )
}


@dataclass(frozen=True)
class ShardingRequest:
    """The arguments of ``world.distribute`` that concern sharding.

    Attributes:
        layout: The layout.
        blocks: Names of modules or classes; None to find the blocks.
        shard_over: "job": over all ranks. "host": over those of each host, with a replica of all
            shards on each host.
        offload: None, "optimizer": optimizer states are kept in the host's memory, or
            "parameters": the shards of parameters and gradients as well.
        options: Those of ``fully_shard``.
    """

    layout: ShardedLayout
    blocks: Sequence[str] | None = None
    shard_over: str = "job"
    offload: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def parse_request(
    layout: str,
    blocks: Sequence[str] | None,
    shard_over: str,
    offload: str | None,
    device: str,
    options: dict[str, Any],
) -> ShardingRequest | None:
    """Return the request of a sharded layout, and None for "data".

    Args:
        device: Type of the device on which the rank computes.

    Raises:
        ValueError: An unknown layout, an option that the layout does not have, or an unknown
            value of one.
    """
    _check_value("layout", layout, ("data", *LAYOUTS, AUTO))
    assert layout != AUTO, "the caller chooses the layout"
    _check_value("shard_over", shard_over, SHARD_OVER)
    _check_value("offload", offload, OFFLOADS)
    if layout == "data":
        given = {"blocks": blocks, "shard_over": shard_over, "offload": offload}
        for name, value in given.items():
            if value not in (None, "job") and (name, value) != ("offload", "optimizer"):
                raise ValueError(
                    f"world.distribute: {name}={value!r} needs a layout that shards, and layout is "
                    f"'data'. HINT: layout='zero3', or leave {name} out"
                )
        return None
    for name in options:
        if name not in FULLY_SHARD_OPTIONS:
            reason = (
                "parameters without a gradient need no option there"
                if name == "find_unused_parameters"
                else "its options are blocks, shard_over, offload and mp_policy"
            )
            raise ValueError(
                f"world.distribute: layout={layout!r} does not have the option {name}: {reason}. "
                f"HINT: leave {name} out, or layout='data'"
            )
    if torch.__version__ < OLDEST_TESTED:
        raise ValueError(
            f"world.distribute: layout={layout!r} needs PyTorch {OLDEST_TESTED} or later; this is "
            f"{torch.__version__}. HINT: pip install -U torch, or layout='data'"
        )
    if offload == "parameters" and device == "cpu":
        raise ValueError(
            f"world.distribute: offload={offload!r} moves shards from a GPU to the host's memory, "
            "and this rank computes on the CPU. HINT: leave offload out"
        )
    return ShardingRequest(LAYOUTS[layout], blocks, shard_over, offload, options)


def _check_value(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        texts = [str(one) for one in allowed]
        near = difflib.get_close_matches(str(value), texts, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"world.distribute: {name} must be one of {', '.join(map(repr, allowed))}; this is "
            f"{value!r}. HINT: {name}={allowed[texts.index(near)]!r}"
        )
