"""Detection of parameters that the script changes between ``world.distribute`` and the first step.

DistributedDataParallel and FSDP2 hold the parameters that a model had when it was distributed. A
parameter that is added or replaced afterwards is not synchronized, or is lost in the next forward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..optim.whole_norms import local_part
from ..record.hooks.phases import UncopiedHook
from .strategy.distributed_model import DistributedModel

HINT = (
    "HINT: change the model first, then create the optimizer, then model, optimizer = "
    "world.distribute(model, optimizer); load_state_dict without assign=True keeps the parameters"
)


@dataclass(frozen=True)
class _Parameter:
    """A parameter as it was when the model was distributed."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Parameter":
        return cls(tensor, tuple(tensor.shape), tensor.dtype, local_part(tensor).device)

    def change_to(self, other: "_Parameter") -> str:
        """Return what has changed since; "" for nothing."""
        for name in ("shape", "dtype", "device"):
            before, now = getattr(self, name), getattr(other, name)
            if before != now:
                return f"had the {name} {before} at world.distribute, and has {now} now"
        return "" if self.tensor is other.tensor else "was replaced after world.distribute"


def watch_parameters(model: DistributedModel) -> None:
    """Check in the first forward of a distributed model that its parameters are the same.

    The forward raises ValueError where they differ, before ranks exchange anything.
    """
    before = _parameters(model.plain)

    def check(*_: Any) -> None:
        handle.remove()
        if model.has_run():
            return  # some parameters are gathered
        found = list(_changes(before, _parameters(model.plain)))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(f"world.distribute: {found[0]}{more}. {HINT}")

    handle = model.called.register_forward_pre_hook(UncopiedHook(check), prepend=True)


def _parameters(model: nn.Module) -> dict[str, _Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: _Parameter.of(parameter) for name, parameter in named}


def _changes(before: dict[str, _Parameter], now: dict[str, _Parameter]) -> Iterator[str]:
    """Yield a sentence for each parameter that has changed."""
    for name, parameter in now.items():
        known = before.get(name)
        if known is None:
            yield f"the parameter {name} was added after world.distribute"
        elif change := known.change_to(parameter):
            yield f"the parameter {name} {change}"
    for name in before:
        if name not in now:
            yield f"the parameter {name} was removed after world.distribute"
