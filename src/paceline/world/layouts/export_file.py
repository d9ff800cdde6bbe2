"""``world.export``: the model of a running training as a file that C, C++ and Fortran call."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.sharded_tensor import is_sharded
from ...parallel.strategy.distributed_model import DistributedModel
from ...parallel.strategy.model_state import WholeModel

if TYPE_CHECKING:  # it imports torch.export and torch.onnx
    from ...deploy.export import ExportResult


def export_from_world(
    model: nn.Module,
    path: Path,
    rank: int,
    build: Callable[[], nn.Module] | None,
    gathered: dict[str, Any] | None,
    **options: Any,
) -> "ExportResult | None":
    """Gather the parameters of ``model`` from all ranks, and export them on rank 0.

    Args:
        gathered: The whole state on rank 0 of a model that a layout divides; None: of another one.
        options: Other arguments of ``world.export``.

    Raises:
        ValueError: The model is sharded and ``build`` is missing, or an argument is wrong.
    """
    state: dict[str, Any] = {}
    sharded = any(map(is_sharded, model.state_dict().values()))
    if gathered is not None:
        sharded, state = True, gathered
    if sharded and build is None:
        raise ValueError(
            "world.export: the model is sharded. HINT: world.export(..., build=lambda: Net()), a "
            "function that returns the plain model"
        )
    if sharded and gathered is None:
        for name, value in model.state_dict().items():  # one whole tensor at a time
            whole = value.full_tensor() if is_sharded(value) else value
            if rank == 0:
                state[name] = whole.cpu() if isinstance(whole, torch.Tensor) else whole
    if rank != 0:
        return None
    if build is None:
        plain = deepcopy(model)
    else:
        plain = build()
        plain.load_state_dict(state if sharded else model.state_dict())
    return _export(plain, path, **options)


def gather_stages(
    model: DistributedModel, whole: WholeModel, gather: Callable[[Any, Any], list[Any]]
) -> dict[str, Any]:
    """Return the state of a model whose tensors are on different ranks, on rank 0. Collective.

    Args:
        gather: Returns a value of each rank on all of them; its second argument is the type.

    Raises:
        ValueError: A rank has a part of a tensor.
    """
    own = {name: t for name, t in model.plain.state_dict().items() if name in whole.shapes}
    kinds = {
        name: "" if model.part_of(name) is not None else str(value.dtype).removeprefix("torch.")
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    every: list[dict[str, str]] = gather(kinds, dict[str, str])
    if any("" in of.values() for of in every):
        raise ValueError(
            "world.export: the layout divides tensors of the model, and no rank has all of one. "
            "HINT: paceline export, with a checkpoint of world.epochs(..., checkpoint=DIR)"
        )
    rank, found = dist.get_rank(), {}
    device = next(iter(model.parameters().values())).device
    for name, shape in whole.shapes.items():
        holder = next((at for at, of in enumerate(every) if name in of), None)
        if holder is None:
            continue  # no tensor
        value = own.get(name)
        if is_sharded(value):  # over the replicas of a stage, which all have the name
            value = value.full_tensor()
        if rank == holder:
            assert value is not None
            tensor = value.detach().contiguous().clone()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, every[holder][name]), device=device)
        dist.broadcast(tensor, holder)
        if rank == 0:
            found[name] = tensor.cpu()
    return found


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
    given_specs = [specification.parse_input(x) for x in given if isinstance(x, str)]
    if tensors and given_specs:
        raise ValueError(
            "world.export: inputs must be texts or tensors. HINT: 'x: float64[batch,6]'"
        )
    dtype, specs = specification.choose_inputs(given_specs, tensors, model)
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
