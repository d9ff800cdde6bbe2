"""A model on parts of samples, compared with the same model on the whole sample.

The whole one computes a corner of the first sample that fits on a rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...comm.group_device import exchangeable
from ..comparison.model_comparison import (
    Division,
    Tensors,
    compare_model,
    tensors_in,
    unchanged,
)
from ..divided.divided_tensor import each_tensor, whole_outputs
from .exchange import summed
from .partition import FROM_END
from .samples import split_inputs
from .split_tensor import SpatialGroups

SIDES = {1: 4096, 2: 128, 3: 32}  # of a corner, by the number of dims of positions
MIN_ROWS = 8  # of a corner, for each rank along a dim
MAX_SAMPLES = 2
MAX_ELEMENTS = 1 << 20  # of inputs that are compared whole, where a corner does not fit the model


class SpatialDivision(Division):
    """One forward of a model whose samples are divided.

    Args:
        args, options: Inputs of the model, whole on this rank.
    """

    subject = "the model on parts of samples"
    cause = (
        "Each layer by itself is right, so code of the model uses a part as if it were the whole "
        "sample. HINT: paceline.Layout(..., rules={'NAME': 'gather'}) with the layer's name"
    )

    def __init__(self, model: nn.Module, groups: SpatialGroups, args: Any, options: Any) -> None:
        self.model, self.groups, self.args, self.options = model, groups, args, options
        self.device = exchangeable(torch.zeros(1), groups.all).device.type

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.groups.all))]
        dist.all_gather(found, tensor.contiguous(), group=self.groups.all)
        return found

    def divided(self) -> Any:
        self.groups.is_compared = True
        try:
            parts = split_inputs((self.args, self.options), self.groups)
            return whole_outputs(self.model.forward(*parts[0], **parts[1]))
        finally:
            self.groups.is_compared = False

    def whole(self) -> Any:
        return self.model.forward(*self.args, **self.options)

    def whole_gradients(self, gradients: Tensors) -> Tensors:
        trained = [one for one in self.model.parameters() if one.requires_grad]
        return [
            summed(torch.zeros_like(parameter) if own is None else own, self.groups.all)
            / dist.get_world_size(self.groups.all)
            for parameter, own in zip(trained, gradients, strict=bool(gradients))
        ]


def compare_parts(
    model: nn.Module, groups: SpatialGroups, args: Any, options: Any, takes_gradients: bool
) -> str:
    """Compare a model in its first forward; return a line about it. Collective.

    Args:
        takes_gradients: Whether gradients are compared too: they need whole parameters.

    Raises:
        DividedModelError: The model on parts differs from the one on whole samples.
    """
    inputs = (args, options)
    kind = "training" if model.training else "evaluation"
    small = _corners(inputs, groups)
    shapes = [[one.shape for one in tensors_in(given)] for given in (inputs, small)]
    if shapes[0] != shapes[1] and not _accepts(model, groups, small):
        positions = max(one.numel() for one in tensors_in(inputs))
        if positions > MAX_ELEMENTS:
            return (
                f"parts of samples ({kind}): the model is not compared with the whole one, as it "
                "does not accept smaller samples"
            )
        small = whole_outputs(inputs)
    found = compare_model(model, SpatialDivision(model, groups, *small), takes_gradients)
    if found.difference is None:
        return f"parts of samples ({kind}): the model is not compared: {found.reason}"
    text = " and ".join(" x ".join(map(str, one.shape)) for one in tensors_in(small))
    return (
        f"parts of samples ({kind}): the whole model differs by {found.difference:.1g}, with "
        f"inputs of {text}; {found.seconds:.2f} s"
    )


def _corners(inputs: Any, groups: SpatialGroups) -> Any:
    """Return a corner of the first samples, whole on all ranks. Collective."""
    samples = {one.size(0) if one.dim() else 0 for one in tensors_in(inputs)}
    count = min(*samples, MAX_SAMPLES) if len(samples) == 1 else None
    ranks = {FROM_END[axis]: len(line.ranks) for axis, line in groups.lines.items()}

    def corner(tensor: torch.Tensor) -> torch.Tensor:
        dims = tensor.dim()
        index = [slice(count)] * min(dims, 1) + [slice(None)] * max(dims - 1, 0)
        if dims - 2 in SIDES:
            for dim in range(2, dims):
                rows = max(SIDES[dims - 2], MIN_ROWS * ranks.get(dims - dim, 1))
                index[dim] = slice(min(rows, tensor.size(dim)))
        found: torch.Tensor = whole_outputs(tensor[tuple(index)])
        return found

    return each_tensor(inputs, corner)


def _accepts(model: nn.Module, groups: SpatialGroups, inputs: Any) -> bool:
    """Return whether the model computes inputs of another size, on all ranks. Collective."""
    accepts = True
    with unchanged(model), torch.no_grad():
        try:
            model.forward(*inputs[0], **inputs[1])
        except Exception:  # of any layer or of the script
            accepts = False
    return all(groups.numbers(int(accepts)).values())
