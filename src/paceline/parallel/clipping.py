"""Clipping by the norm of the whole gradient, of which ranks may hold parts."""

import functools
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

from ..comm.group_device import exchangeable
from ..optim.whole_norms import holds_shards, local_part, whole_norms
from .mesh import MODEL_AXES, Mesh
from .strategy.distributed_model import DistributedModel


def clip_gradients(
    parameters: Sequence[torch.Tensor],
    limit: float,
    mesh: Mesh | None = None,
    models: Sequence[DistributedModel] = (),
) -> None:
    """Scale the gradients of all parameters together, so that their L2 norm is at most ``limit``.

    PyTorch's clip_grad_norm_ does so for gradients that are all whole. It can't mix whole and
    sharded ones, nor shards of different groups of ranks, and runs a collective for each dtype.

    Args:
        mesh: The ranks; all of them must call this where it has axes that divide models.
        models: They know along which axes other ranks hold other parameters.
    """
    held = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in held if p.grad is not None]
    is_parted = mesh is not None and mesh.is_divided
    if not holds_shards(gradients) and not is_parted:
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    squares = whole_norms(gradients).square() if gradients else torch.zeros(0, dtype=torch.float64)
    if mesh is not None and is_parted:
        total = _sum_over_parts(squares, held, mesh, models).sqrt()
    else:
        total = squares.sum().sqrt()
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = local_part(gradient)
        part.mul_(factor.to(part.device, part.dtype))


def refuse_local_norms(models: Sequence[DistributedModel]) -> None:
    """Let PyTorch's ``clip_grad_norm_`` and ``get_total_norm`` raise ValueError where this rank's
    norm is not the whole one: for gradients of which other ranks hold parts.

    models: Those of the world, also later ones.
    """
    # what the function of PyTorch calls is replaced, because scripts may have imported it before
    (called,) = clip_grad._get_total_norm.__closure__  # type: ignore[misc]
    original: Callable[..., torch.Tensor] = called.cell_contents

    @functools.wraps(original)
    def total_norm(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        tensors = list(tensors) if not isinstance(tensors, torch.Tensor) else [tensors]
        given = set(map(id, tensors))
        for model in models:
            for name, parameter in model.parameters().items():
                if id(parameter.grad) in given and model.parted_axes(name):
                    raise ValueError(
                        "torch.nn.utils.get_total_norm or clip_grad_norm_: the layout divides the "
                        f"model, and this rank has a part of the gradients, such as that of {name}:"
                        " the norm would be that of its part. HINT: world.step(optimizer, clip=1.0)"
                    )
        return original(tensors, *args, **options)

    called.cell_contents = total_norm


def _sum_over_parts(
    squares: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    mesh: Mesh,
    models: Sequence[DistributedModel],
) -> torch.Tensor:
    """Return the sum over all parameters of all ranks, each counted once. Collective.

    Ranks may hold different parameters, so each one adds the same numbers along each axis: one for
    each set of axes along which parameters can differ.
    """
    axes = [axis for axis in MODEL_AXES if axis in mesh.shape]
    sets = [frozenset(chosen) for n in range(len(axes) + 1) for chosen in combinations(axes, n)]
    named = [(model, *of) for model in models for of in model.parameters().items()]
    parted = {id(parameter): model.parted_axes(name) for model, name, parameter in named}
    counted = {id(parameter): model.is_first_copy(name) for model, name, parameter in named}
    sums = squares.new_zeros(len(sets))
    for square, parameter in zip(squares, parameters, strict=True):
        if counted.get(id(parameter), True):
            sums[sets.index(parted.get(id(parameter), frozenset()) & frozenset(axes))] += square
    for axis in axes:
        at = [i for i, axes_set in enumerate(sets) if axis in axes_set]
        group = mesh.group(axis)
        sent = exchangeable(sums[at], group)
        dist.all_reduce(sent, group=group)
        sums[at] = sent.to(sums.device)
    return sums.sum()
