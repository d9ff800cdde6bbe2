"""Norms and dropout that compute with a part of the tokens (Korthikanti et al., arXiv 2205.05198).

Tensors [batch, tokens, features] between pairs of layers have the same value on all ranks. With a
rule "sequence" each rank computes them for its part of the tokens: the sums of ``row`` layers and
of ``vocabulary`` embeddings are divided (reduce-scatter instead of all-reduce), and ``column``
layers gather their input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...record.hooks.phases import UncopiedHook
from .exchange import scattered
from .parameters import Views
from .split_tensor import SplitTensor
from .splits import Split

TOKEN_DIM = 1


def divide_tokens(module: nn.Module, name: str, views: Views, say: Callable[[str], None]) -> None:
    """Let a module compute with this rank's part of the tokens.

    Args:
        say: Called once with a line if the module gets tokens that can't be divided.
    """
    said: list[str] = []

    def before(_: nn.Module, args: Any) -> Any:
        x = args[0] if args else None
        if views.are_whole or isinstance(x, SplitTensor) or not isinstance(x, torch.Tensor):
            return None
        axis, split = views.axis, Split(TOKEN_DIM)
        if x.dim() != 3 or not split.divides(x.shape[TOKEN_DIM], axis.size):
            if not said:
                said.append(name)
                say(
                    f"tensor axis: {name} ('sequence') gets the shape {tuple(x.shape)}, whose dim "
                    f"{TOKEN_DIM} of 3 can't be divided by {axis.size} ranks: each rank computes "
                    f"all of it. HINT: sequences padded to a multiple of {axis.size}"
                )
            return None
        return SplitTensor.of(scattered(x, split, axis), split, axis), *args[1:]

    module.register_forward_pre_hook(UncopiedHook(before))
