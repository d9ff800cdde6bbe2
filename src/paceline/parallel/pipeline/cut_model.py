"""Leave one stage of a model on a rank: other stages' tensors are removed from it."""

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from .atoms import tensor_names


def keep_tensors(model: nn.Module, kept: Collection[str]) -> None:
    """Remove the parameters and buffers that are not kept, under all their names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for full, name in tensor_names(model).items():
        if name in kept:
            continue
        owner, _, key = full.rpartition(".")
        module = modules[owner]
        module._parameters.pop(key, None)
        module._buffers.pop(key, None)


def keep_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer train the model's parameters only, with the states that they have."""
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) in own]
