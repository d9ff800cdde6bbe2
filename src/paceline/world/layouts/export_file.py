"""``world.export``: the model of a running training as a file that C, C++ and Fortran call."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...checkpoint.sharded_tensor import is_sharded

if TYPE_CHECKING:  # it imports torch.export and torch.onnx
    from ...deploy.export import ExportResult


def export_from_world(
    model: nn.Module,
    path: Path,
    rank: int,
    inputs: str | Sequence[str] | torch.Tensor | Sequence[torch.Tensor],
    build: Callable[[], nn.Module] | None,
    bounds: Mapping[str, tuple[int, int]] | None,
    fields: Mapping[str, Mapping[str, Any]] | None,
    backends: Sequence[str] | None,
    tolerance: float | None,
) -> "ExportResult | None":
    """Gather the parameters of ``model`` from all ranks, and export them on rank 0.

    Raises:
        ValueError: The model is sharded and ``build`` is missing, or an argument is wrong.
    """
    state: dict[str, Any] = {}
    sharded = any(is_sharded(one) for one in model.state_dict().values())
    if sharded and build is None:
        raise ValueError(
            "world.export: the model is sharded. HINT: world.export(..., build=lambda: Net()), a "
            "function that returns the plain model"
        )
    if sharded:
        for name, one in model.state_dict().items():  # one whole tensor at a time
            whole = one.full_tensor() if is_sharded(one) else one
            if rank == 0:
                state[name] = whole.cpu() if isinstance(whole, torch.Tensor) else whole
    if rank != 0:
        return None
    if build is None:
        plain = deepcopy(model)
    else:
        plain = build()
        plain.load_state_dict(state if sharded else model.state_dict())
    return _export(plain, path, inputs, bounds, fields, backends, tolerance)


def _export(
    model: nn.Module,
    path: Path,
    inputs: str | Sequence[str] | torch.Tensor | Sequence[torch.Tensor],
    bounds: Mapping[str, tuple[int, int]] | None,
    fields: Mapping[str, Mapping[str, Any]] | None,
    backends: Sequence[str] | None,
    tolerance: float | None,
) -> "ExportResult":
    from ...deploy import specification
    from ...deploy.export import BACKENDS, export_model

    given = [inputs] if isinstance(inputs, str | torch.Tensor) else list(inputs)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    said = [specification.parse_input(x) for x in given if isinstance(x, str)]
    if tensors and said:
        raise ValueError(
            "world.export: inputs must be texts or tensors. HINT: 'x: float64[batch,6]'"
        )
    dtype, specs = specification.choose_inputs(said, tensors, model)
    values = {k: specification.FieldValues(**v) for k, v in (fields or {}).items()}
    return export_model(
        model,
        specs,
        dtype,
        path,
        examples=tensors,
        bounds=bounds,
        fields=values,
        backends=backends or BACKENDS,
        tolerance=tolerance,
    )
