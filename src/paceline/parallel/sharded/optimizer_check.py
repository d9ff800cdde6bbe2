"""Check that an optimizer can update shards, before anything is changed."""

import torch
from torch import nn
from torch.optim import Optimizer

from ...optim.gradients import parameters_of

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
