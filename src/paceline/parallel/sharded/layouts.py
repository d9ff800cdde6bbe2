"""What a sharded layout asks of ``fully_shard``, and which models and optimizers it can shard."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...optim.gradients import parameters_of
from ...record.hooks.phases import has_users_hooks
from ..blocks import gathered_blocks

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


def check_sharding(model: nn.Module, optimizer: Optimizer | None, request: ShardingRequest) -> None:
    """Raise ValueError for a model, an optimizer or blocks that can't be sharded."""
    problem = next(_problems(model), None)
    if problem is not None:
        what, hint = problem
        raise ValueError(f"world.distribute: layout={request.name!r}: {what}. HINT: {hint}")
    for block in [*gathered_blocks(model, request.blocks), ""]:
        _check_dtypes(block, model.get_submodule(block))
    if optimizer is not None:
        check_optimizer(model, optimizer, request.name)


def _problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and what to do about it."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if isinstance(module, DistributedDataParallel) or kinds & {
            "FSDPModule",
            "FullyShardedDataParallel",
        }:
            where = f"its module {name}" if name else "the model"
            yield f"{where} is distributed already", "give the plain model to world.distribute"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"{name} has sparse gradients", "sparse=False, or layout='data'"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            yield (
                f"the parameter {name} has no shape yet",
                "run one forward before world.distribute",
            )
        elif parameter.dim() == 0:
            yield (
                f"the parameter {name} has no dimension that could be divided",
                "make it a tensor of shape (1,)",
            )
        elif not parameter.numel() and parameter.requires_grad:
            yield (
                f"the parameter {name} has no elements",
                f"set {name}.requires_grad_(False), or remove the parameter",
            )
        elif not parameter.is_contiguous():
            yield (
                f"the parameter {name} is not contiguous in memory",
                "model.to(memory_format=torch.contiguous_format), or parameter.contiguous()",
            )
    yield from _hook_problems(model)
    yield from _buffer_problems(model)


def check_hooks(model: nn.Module, request: ShardingRequest) -> None:
    """Raise ValueError for hooks on gradients, which sharding would lose."""
    for what, hint in _hook_problems(model):
        raise ValueError(f"world.distribute: layout={request.name!r}: {what}. HINT: {hint}")


def _hook_problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in model.named_parameters():
        if has_users_hooks(parameter):
            yield (
                f"the parameter {name} has a hook on its gradient, which would not run on its "
                "shard",
                "register the hook after world.distribute, or layout='data'",
            )


def _buffer_problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield buffers that share memory with a parameter, which sharding moves."""
    owners = {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta" and not isinstance(parameter, UninitializedParameter)
    }
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta" or not buffer.numel():
            continue
        owner = owners.get(buffer.untyped_storage().data_ptr())
        if owner is not None:
            yield (
                f"the buffer {name} shares memory with the parameter {owner}",
                "compute it in forward, or clone it",
            )


def _check_dtypes(block: str, module: nn.Module) -> None:
    """Raise ValueError where the trained parameters of one block have several dtypes."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    found = {parameter.dtype: name for name, parameter in reversed(trained)}
    if len(found) > 1:
        shown = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in found.items()
        )
        raise ValueError(
            f"world.distribute: the trained parameters of {block or 'the model'} have several "
            f"dtypes: {shown}. HINT: use one dtype, such as model.float()"
        )


# Optimizers of PyTorch whose step fails with shards (distributed tensors), or gives each rank
# another result than one process has: they use all elements of a parameter, or of all parameters.
NEEDS_WHOLE_PARAMETERS = ("Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam")


def check_optimizer(model: nn.Module, optimizer: Optimizer, layout: str) -> None:
    """Raise ValueError for an optimizer of other parameters, or one that needs whole ones."""
    kind = type(optimizer).__name__
    known = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in known for parameter in parameters_of(optimizer)):
        raise ValueError(
            f"world.distribute: the {kind} holds none of the model's "
            "parameters. HINT: create the optimizer for model.parameters(), before model, "
            "optimizer = world.distribute(model, optimizer)"
        )
    found = (getattr(torch.optim, name, None) for name in NEEDS_WHOLE_PARAMETERS)
    kinds = tuple(filter(None, found))  # Muon is not in older versions of PyTorch
    if isinstance(optimizer, kinds):
        raise ValueError(
            f"world.distribute: {kind} can't update the shards of layout={layout!r}: its step "
            "needs whole parameters. HINT: layout='data', or another optimizer, such as AdamW"
        )
