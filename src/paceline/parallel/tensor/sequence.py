"""Norms and dropout that compute with a part of the tokens (Korthikanti et al., arXiv 2205.05198).

Tensors [batch, tokens, features] between pairs of layers have the same value on all ranks. With a
rule "sequence" each rank computes them for its part of the tokens: the sums of ``row`` layers and
of ``vocabulary`` embeddings are divided (reduce-scatter instead of all-reduce), and ``column``
layers gather their input.
"""

from collections.abc import Callable, Container
from typing import Any, ClassVar

import torch
from torch import nn

from ...knobs.knob import KnobResult
from ...record.hooks.phases import UncopiedHook
from .exchange import scattered
from .kinds import SEQUENCE
from .parameters import Views
from .split_tensor import SplitTensor
from .splits import Split

TOKEN_DIM = 1
_WITHOUT_RULES = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)


class _Requested:
    """Whether a knob asks for parts of the tokens in this process."""

    turned: ClassVar[KnobResult | None] = None


def set_sequence(_: bool, turned: KnobResult) -> None:
    """Divide the tokens between the pairs of each model with a tensor axis."""
    _Requested.turned = turned


def requested_modules(model: nn.Module, known: Container[str]) -> dict[str, str]:
    """Return the kind of norms and dropout that have none, if the knob asks for it."""
    if _Requested.turned is None:
        return {}
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, _WITHOUT_RULES)]
    found = {name: SEQUENCE for name, _ in modules if name and name not in known}
    if found:
        _Requested.turned.done()
    else:
        _Requested.turned.not_done("the model has no norms and no dropout without rules")
    return found


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
                say(_undivided(name, tuple(x.shape), axis.size))
            return None
        return SplitTensor.of(scattered(x, split, axis), split, axis), *args[1:]

    module.register_forward_pre_hook(UncopiedHook(before))


def _undivided(name: str, shape: tuple[int, ...], ranks: int) -> str:
    """Return the line for a module whose tokens are not divided."""
    if len(shape) != 3:
        why = "which is not [batch, tokens, features]"
        hint = f"rules without 'sequence' for {name!r}"
    else:
        why = f"whose dim {TOKEN_DIM} can't be divided by {ranks} ranks"
        hint = f"sequences padded to a multiple of {ranks}"
    return (
        f"tensor axis: {name} ('sequence') gets the shape {shape}, {why}: each rank computes all "
        f"of it. HINT: {hint}"
    )
