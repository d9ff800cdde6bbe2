"""Check that an optimizer can update the parts of a model that a layout has divided."""

from torch.optim import Optimizer

from ...checkpoint.sharded_tensor import is_sharded
from .distributed_model import DistributedModel

# By name, of PyTorch and of Paceline. Their step uses all elements of a parameter;
_NEEDS_WHOLE_PARAMETERS = frozenset(("Adafactor", "Muon"))
# the same, but distributed tensors (DTensor) are supported;
_NEEDS_WHOLE_TENSORS = frozenset(("LARS", "LAMB"))
# all elements of all parameters.
_NEEDS_ALL_PARAMETERS = frozenset(("LBFGS",))


def check_divided(model: DistributedModel, optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step would differ from that of one process.

    It is called when the model has been divided, before the first step.
    """
    parameters = model.parameters()
    has_parts = any(model.part_of(name) is not None for name in parameters)
    has_shards = any(map(is_sharded, parameters.values()))
    needs = {
        "whole parameters": (_NEEDS_WHOLE_PARAMETERS, has_parts or has_shards),
        "norms of whole parameters": (_NEEDS_WHOLE_TENSORS, has_parts),
        "all parameters": (_NEEDS_ALL_PARAMETERS, model.is_parted),
    }
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    for what, (names, is_missing) in needs.items():
        if is_missing and kinds & names:
            raise ValueError(
                f"world.distribute: the step of {type(optimizer).__name__} needs {what}, of which "
                "each rank holds a part in this layout. HINT: layout='data', or another "
                "optimizer, such as AdamW"
            )
