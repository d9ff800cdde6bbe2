"""Translate the graph of ``torch.export`` into a list of operations."""

import warnings

import torch
from torch.export import ExportedProgram

# The modules of rules register them when they are imported.
from . import rules_of_layers as rules_of_layers
from . import rules_of_shapes as rules_of_shapes
from . import rules_of_values as rules_of_values
from .translation import Builtin, Translation
from .values import UnsupportedError


def translate(exported: ExportedProgram, dtype: torch.dtype) -> Builtin:
    """Return the builtin backend's data of a model.

    Raises:
        UnsupportedError: The builtin backend can't compute the model.
    """
    return Translation(_without_changes(exported), dtype).run()


def _without_changes(exported: ExportedProgram) -> ExportedProgram:
    """Return the program without operators that change a tensor in place: the rules are of values,
    and neither later uses of a changed tensor nor its views would see the change."""
    if not _changes(exported):
        return exported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})  # no operator is taken apart
    except Exception as error:  # of any kind
        raise UnsupportedError(f"changes in place: {type(error).__name__}: {error}") from error
    if left := _changes(exported):
        raise UnsupportedError(f"the operator {left[0]}, which changes a tensor in place")
    return exported


def _changes(exported: ExportedProgram) -> list[str]:
    """Return the operators that change values in place: all such ones but detach_."""
    return [
        str(node.target)
        for node in exported.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target is not torch.ops.aten.detach_.default
    ]
