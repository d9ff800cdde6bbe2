"""Optimizers of models whose parameters a layout has divided into parts."""

from torch.optim import Optimizer

from ...checkpoint.sharded_tensor import is_sharded
from ...optim.whole_norms import note_part
from ..mesh import STAGE, Mesh
from .distributed_model import DistributedModel

# By name, of PyTorch and of Paceline. Their step uses all elements of a parameter;
_NEEDS_WHOLE_PARAMETERS = frozenset(("Adafactor", "Muon"))
# all elements of all parameters.
_NEEDS_ALL_PARAMETERS = frozenset(("LBFGS",))


def note_parts(model: DistributedModel, mesh: Mesh) -> None:
    """Let norms of parameters be those of whole ones, for LARS and LAMB.

    It is called on all ranks when the model has been divided.
    """
    for name, parameter in model.parameters().items():
        axes = model.parted_axes(name) - {STAGE}  # a stage has whole tensors
        if axes and model.part_of(name) is not None:
            note_part(parameter, mesh.group(*axes))


def check_divided(model: DistributedModel, optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step would differ from that of one process.

    It is called when the model has been divided, before the first step.
    """
    parameters = model.parameters()
    has_parts = any(model.part_of(name) is not None for name in parameters)
    has_shards = any(map(is_sharded, parameters.values()))
    needs = {
        "whole parameters": (_NEEDS_WHOLE_PARAMETERS, has_parts or has_shards),
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
