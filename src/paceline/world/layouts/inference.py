"""What ``World`` does with models beside training: inference of divided samples, and export."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...checkpoint.sharded_tensor import is_sharded
from ...parallel.mesh import Mesh
from ...parallel.strategy.distributed_model import DistributedModel
from ...parallel.strategy.model_state import WholeModel

if TYPE_CHECKING:  # imported by the first layout that divides samples
    from ...deploy.export import ExportResult
    from ...parallel.spatial.samples import LoadedParts
    from ...parallel.spatial.split_tensor import SpatialGroups

Slices = tuple[slice, ...]


class SampleParts:
    """Divide samples along depth, height and width. ``World`` sets the attributes."""

    mesh: Mesh
    device: torch.device

    def slices(self, shape: Sequence[int]) -> Slices:
        """Return which part of an array of this shape this rank computes with.

        The last three dims are depth, height and width; a rank reads
        ``array[world.slices(array.shape)]`` and nothing else. Without axes d, h or w it is all.

        Raises:
            ValueError: The array lacks a divided dim, or has fewer rows than ranks.
        """
        from ...parallel.spatial.samples import slices_of

        groups = self._spatial_groups()
        return slices_of(shape, groups) if groups else (slice(None),) * len(shape)

    def part(self, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor of samples as a divided one, with which models and losses compute.

        Args:
            tensor: The whole samples [samples, channels, [[depth,] height,] width], the same on
                all ranks of a sample; or with ``shape`` this rank's part, as ``world.slices`` cuts
                it. Without axes d, h or w it is returned as it is.
            shape: Of the whole.

        Raises:
            ValueError: The tensor does not have the shape of this rank's part.
        """
        from ...parallel.spatial.samples import from_part, split_positions

        groups = self._spatial_groups()
        if not groups:
            return tensor
        return (
            split_positions(tensor, groups) if shape is None else from_part(tensor, shape, groups)
        )

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a divided tensor whole on all ranks of its sample. Collective among them.

        Other tensors are returned as they are.
        """
        from ...parallel.divided.divided_tensor import whole_outputs

        found: torch.Tensor = whole_outputs(tensor)
        return found

    def predict(self, model: nn.Module, volume: Any, out: Any) -> None:
        """Compute ``model`` of one volume that no rank can hold, and write the result. Collective.

        Each rank reads its part, computes in evaluation mode without gradients, and writes its
        part of the result; ranks write one after the other, so that they can share chunks.

        Args:
            model: Of ``world.distribute`` in a layout with axes d, h or w.
            volume: Array with ``shape`` (channels, [[depth,] height,] width) that is indexed by
                slices: NumPy, ``numpy.memmap``, zarr, h5py. All ranks open the same one. Real
                numbers are converted to the dtype of the model's parameters.
            out: Array of the result's shape, of the same kinds.

        Raises:
            ValueError: The result has another shape than ``out``, or is not divided.
        """
        shape = (1, *volume.shape)
        part = np.asarray(volume[self.slices(shape)[1:]])[None]
        part = np.ascontiguousarray(part, part.dtype.newbyteorder("="))
        inputs = torch.from_numpy(part).to(self.device)
        dtypes = (
            parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
        )
        if not inputs.is_complex() and (dtype := next(dtypes, None)) is not None:
            inputs = inputs.to(dtype)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                result = model(self.part(inputs, shape))
        finally:
            for module, is_training in modes:
                module.training = is_training
        if tuple(result.shape[1:]) != tuple(out.shape):
            raise ValueError(
                f"world.predict: the result has shape {tuple(result.shape[1:])}, and out "
                f"{tuple(out.shape)}. HINT: an array of the result's shape"
            )
        self._write_in_turns(result, out)

    def _write_in_turns(self, result: torch.Tensor, out: Any) -> None:
        from ...parallel.spatial.split_tensor import SplitTensor

        place: Slices = (slice(None),) * (result.dim() - 1)
        local = result
        if isinstance(result, SplitTensor):
            place, local = result.slices[1:], result.local
        first = local[0].cpu()
        values = (first.float() if first.dtype is torch.bfloat16 else first).numpy()
        group = self.mesh.model_group if self._spatial_groups() else None
        ranks = self.mesh.sharing_samples
        writers = ranks if isinstance(result, SplitTensor) else ranks[:1]
        for rank in writers:
            if rank == self.mesh.rank and values.size:
                out[place] = values
                if hasattr(out, "flush"):
                    out.flush()
            if group is not None:
                dist.barrier(group)

    def _sample_division(self) -> "LoadedParts | None":
        """Return how loaders divide samples; None without axes d, h or w."""
        groups = self._spatial_groups()
        if groups is None:
            return None
        from ...parallel.spatial.samples import LoadedParts

        return LoadedParts(groups)

    def _spatial_groups(self) -> "SpatialGroups | None":
        if not {"depth", "height", "width"} & self.mesh.shape.keys():
            return None
        from ...parallel.spatial.samples import spatial_groups

        return spatial_groups(self.mesh)


# ``world.export``: the model of a running training as a file that C, C++ and Fortran call.


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
    own_kinds = {
        name: "" if model.part_of(name) is not None else str(value.dtype).removeprefix("torch.")
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    }
    kinds_by_rank: list[dict[str, str]] = gather(own_kinds, dict[str, str])
    if any("" in kinds.values() for kinds in kinds_by_rank):
        raise ValueError(
            "world.export: the layout divides tensors of the model, and no rank has all of one. "
            "HINT: paceline export, with a checkpoint of world.epochs(..., checkpoint=DIR)"
        )
    rank, state = dist.get_rank(), {}
    device = next(iter(model.parameters().values())).device
    for name, shape in whole.shapes.items():
        holder = next((n for n, kinds in enumerate(kinds_by_rank) if name in kinds), None)
        if holder is None:
            continue  # no tensor
        value = own.get(name)
        if is_sharded(value):  # over the replicas of a stage, which all have the name
            value = value.full_tensor()
        if rank == holder:
            assert value is not None
            tensor = value.detach().contiguous().clone()
        else:
            dtype = getattr(torch, kinds_by_rank[holder][name])
            tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, holder)
        if rank == 0:
            state[name] = tensor.cpu()
    return state


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

    input_list = [inputs] if isinstance(inputs, str | torch.Tensor) else list(inputs)
    tensors = [x for x in input_list if isinstance(x, torch.Tensor)]
    given_specs = [specification.parse_input(x) for x in input_list if isinstance(x, str)]
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
