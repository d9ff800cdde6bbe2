"""Translate the graph of ``torch.export`` into a list of operations."""

import torch
from torch.export import ExportedProgram

# The modules of rules register them when they are imported.
from . import rules_of_layers as rules_of_layers
from . import rules_of_shapes as rules_of_shapes
from . import rules_of_values as rules_of_values
from .translation import Builtin, Translation


def translate(exported: ExportedProgram, dtype: torch.dtype) -> Builtin:
    """Return the builtin backend's data of a model that changes nothing in place.

    Raises:
        UnsupportedError: The builtin backend can't compute the model.
    """
    return Translation(exported, dtype).run()
