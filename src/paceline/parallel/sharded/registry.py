"""The sharded models of this process, for code that must work without FSDP's import."""

import traceback
import weakref
from typing import Protocol

import torch
from torch import nn

from ...record.hooks.collective_check import SAME_BLOCKS, block_in

_AVERAGE = "average = [p.detach().clone() for p in model.parameters()] after world.distribute"
# of the exchange in shared memory
_MISMATCH_PHRASE = "ranks call different collectives"


class ShardedModel(Protocol):
    """What the training loop needs of a model whose parameters are sharded.

    Attributes:
        shards: By the name of the parameter in the plain model, what the optimizer holds.
        is_replicated: Whether several ranks hold the same shard.
        blocks: Names of the modules that are gathered as a whole; "" for the model.
    """

    shards: dict[str, nn.Parameter]
    is_replicated: bool
    blocks: list[str]

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backward is the last one before the step."""

    def set_buffer_sync(self, enabled: bool) -> None:
        """Set whether forwards broadcast rank 0's buffers first."""

    def discard_gradients(self) -> None:
        """Discard all gradients, also those that are not exchanged yet."""

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient, exchanged or not."""

    def has_run(self) -> bool:
        """Return whether a forward has run, after which parameters may be whole."""

    def shard_index(self) -> int:
        """Return which shard this rank has; ranks with the same one have equal parameters."""

    def name_nonfinite(self, exchanged: torch.Tensor) -> list[str]:
        """Return the parameters with elements that are not finite in a reduce-scatter's input."""


_sharded: "weakref.WeakKeyDictionary[nn.Module, ShardedModel]" = weakref.WeakKeyDictionary()


def register(model: nn.Module, sharded: ShardedModel) -> None:
    _sharded[model] = sharded


def sharded_of(model: nn.Module) -> ShardedModel | None:
    """Return how a model is sharded; None for one that is not."""
    return _sharded.get(model)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's parameters as optimizers hold them, at any time of a step."""
    sharded = sharded_of(model)
    return list(model.parameters()) if sharded is None else list(sharded.shards.values())


def block_of(model: nn.Module, parameter: str) -> str:
    """Return the name of the block that a parameter of a sharded model is gathered with."""
    sharded = sharded_of(model)
    blocks = [] if sharded is None else sharded.blocks
    return max((name for name in blocks if parameter.startswith(f"{name}.")), key=len, default="")


def explain(error: BaseException) -> str | None:
    """Return the cause of an error of a sharded model, and what to do; None for other errors."""
    text = str(error)
    if not _sharded:
        return None
    if "mixed torch.Tensor and DTensor" in text:
        return (
            "an operation outside of a forward used a sharded parameter together with a whole "
            "tensor. HINT: compute it inside model(...), or in a method of the model that has a "
            f"tensor among its arguments; to average weights, {_AVERAGE}"
        )
    if "FSDP does not support deepcopy" in text or ("pickle" in text and ".FSDP" in text):
        return (
            "a sharded model can't be copied or pickled as a whole, because each rank has only "
            f"its shards. HINT: to average weights, {_AVERAGE}; to save them in one file, "
            "world.epochs(checkpoint=FOLDER), then `paceline convert FOLDER model.safetensors`"
        )
    if "setStorage" in text and "of size 0" in text:
        return (
            "a backward needs parameters of a sharded block that another backward of the same "
            "forward has released, such as torch.autograd.grad(..., create_graph=True) for a "
            "gradient penalty. HINT: layout='data'"
        )
    if _MISMATCH_PHRASE in text:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        block = next((found for frame in reversed(frames) if (found := block_in(frame))), None)
        if block is not None:
            what = text.partition(". HINT: ")[0].strip().splitlines()[0]
            return f"{what}; this rank gathers or reduces {block[1]}. HINT: {SAME_BLOCKS}"
    return None
