"""Methods of a model that compute like its forward: gather the parameters around them too.

FSDP gathers a block's parameters around ``forward`` only. A method of the model's own class that
is called with a tensor (``model.encode(x)``) runs between the same hooks, unless it is called from
the forward itself.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from ..replicated.replica import has_tensor, own_methods


def wrap_methods(module: FSDPModule) -> None:
    """Let methods of the module's own class gather the parameters when called with a tensor."""
    for name in own_methods(module):
        plain = getattr(module, name)
        register_fsdp_forward_method(module, name)  # type: ignore[arg-type]
        gathering = getattr(module, name)
        setattr(module, name, _choosing(module, plain, gathering))


def _choosing(
    module: FSDPModule, plain: Callable[..., Any], gathering: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*args: Any, **options: Any) -> Any:
        # within a forward of this module its parameters are whole
        is_inside = module._get_fsdp_state()._training_state == TrainingState.FORWARD
        gathers = has_tensor(args, options) and not is_inside
        return (gathering if gathers else plain)(*args, **options)

    return method
