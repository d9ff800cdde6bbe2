"""The part of ``World`` for samples that no rank holds whole: their parts, and inference."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...parallel.mesh import Mesh

if TYPE_CHECKING:  # imported by the first layout that divides samples
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
        dtypes = (one.dtype for one in model.parameters() if one.is_floating_point())
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
