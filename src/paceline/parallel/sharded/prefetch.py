"""When the blocks of an FSDP2 model are gathered, and how long they stay gathered."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...knobs.knob import KnobResult
from ...record.hooks.taps import Function, Tap

STATE_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def prefetch_blocks(model: nn.Module, count: int) -> None:
    """Gather ``count`` blocks ahead in forward and in backward, in the order of their modules.

    FSDP2 by itself gathers one block ahead: in forward on a GPU only, in backward in the order in
    which the blocks ran. On a CPU it waits for each gather where it is launched, so the gathers
    become asynchronous here.
    """
    modules: list[FSDPModule] = [
        module for module in model.modules() if isinstance(module, FSDPModule)
    ]
    orders = (modules, [*modules[:1], *reversed(modules[1:])])  # the model's backward comes first
    for at in range(len(modules)):
        forward, backward = (order[at + 1 : at + 1 + count] for order in orders)
        orders[0][at].set_modules_to_forward_prefetch(forward)
        orders[1][at].set_modules_to_backward_prefetch(backward)
    if modules and _computes_on_cpu(model):
        modules[0]._set_unshard_async_op(True)


def _computes_on_cpu(model: nn.Module) -> bool:
    shards = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return any(shard.device_mesh.device_type == "cpu" for shard in shards)


def set_prefetch(count: int, turned: KnobResult) -> None:
    """Gather ``count`` blocks ahead in each model that the script shards."""
    _change_models(lambda model: prefetch_blocks(model, int(count)), turned)


def set_keep_gathered(_: bool, turned: KnobResult) -> None:
    """Keep the blocks of each sharded model gathered between forward and backward."""

    def keep(model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        model.set_reshard_after_forward(False)

    _change_models(keep, turned)


def _change_models(change: Callable[[nn.Module], None], turned: KnobResult) -> None:
    """Call ``change`` with each sharded model, before its first forward.

    FSDP2 knows by then which modules are blocks of a model, and their order.
    """

    def lazy_init(initialize: Function, state: Any) -> None:
        is_first = state._is_root is None
        initialize(state)
        if not is_first:
            return
        try:
            change(state._modules[0])
            turned.done()
        except Exception as error:  # must not end the script
            turned.not_done(f"{type(error).__name__}: {error}")

    Tap(STATE_MODULE, "FSDPState._lazy_init").around(lazy_init)
