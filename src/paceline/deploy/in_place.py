"""Programs of ``torch.export`` without operators that change a tensor in place."""

import warnings

import torch
from torch.export import ExportedProgram


def without_changes(exported: ExportedProgram) -> ExportedProgram:
    """Return a program in which each change in place is a new value, also in later uses of the
    tensor and of its views.

    Raises:
        ValueError: The model changes its inputs or its buffers, which belong to the caller and to
            all calls, or an operator has no form without a change.
    """
    if not _changes(exported):
        return exported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})  # no operator is taken apart
    except Exception as error:  # of any kind
        raise ValueError(
            f"the model changes tensors in place: {type(error).__name__}: {str(error)[:2000]} "
            "HINT: operators that return a new tensor, as x = x + 1 for x += 1"
        ) from error
    signature = exported.graph_signature
    if signature.user_inputs_to_mutate:
        raise ValueError("the model changes an input in place. HINT: x = x.clone() before that")
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise ValueError(
            "the model changes its buffers or parameters in evaluation mode. HINT: let it return "
            "what has to be kept between calls"
        )
    if left := _changes(exported):
        raise ValueError(f"the operator {left[0]} changes a tensor in place")
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
