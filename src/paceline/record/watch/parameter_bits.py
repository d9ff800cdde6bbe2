"""A checksum of parameters, by which ranks see whether they hold the same ones."""

from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 1_000_003  # so that parameters that are exchanged change the sum


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a plain one, and not a rank's part of a sharded parameter."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_sparse


def parameter_bits(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the bits of parameters as one int64; None without a whole parameter."""
    total: torch.Tensor | None = None
    for parameter in parameters:
        if not is_whole(parameter) or not parameter.numel():
            continue
        tensor = parameter.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        aligned = tensor.is_contiguous() and tensor.data_ptr() % 8 == 0
        if aligned and tensor.nbytes % 8 == 0:  # ten times as fast as widening each element
            tensor = tensor.flatten().view(torch.int64)
        one = tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        if total is not None and total.device != one.device:
            one = one.to(total.device)
        total = one if total is None else total * _FACTOR + one
    return total
