"""The kinds of division, and which parameters of a layer each one divides."""

import re
from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from .parameters import gates_of, weight_names
from .splits import Split

Splits = dict[str, Split]
REPLICATE = "replicate"
SEQUENCE = "sequence"


class DivisionError(ValueError):
    """A layer that a kind does not divide, or not over this number of ranks."""


def _linear_columns(layer: nn.Linear, ranks: int, blocks: int) -> Splits:
    _check("output features", layer.out_features, blocks, ranks)
    return {"weight": Split(0, blocks), "bias": Split(0, blocks)}


def _linear_rows(layer: nn.Linear, ranks: int, blocks: int) -> Splits:
    _check("input features", layer.in_features, blocks, ranks)
    return {"weight": Split(1, blocks)}


def _embedding(layer: nn.Embedding, ranks: int, dim: int) -> Splits:
    if layer.max_norm is not None:
        raise DivisionError("it has max_norm, which changes the weight in forward")
    _check(("rows", "columns")[dim], (layer.num_embeddings, layer.embedding_dim)[dim], 1, ranks)
    return {"weight": Split(dim)}


def _embedding_rows(layer: nn.Embedding, ranks: int, blocks: int) -> Splits:
    return _embedding(layer, ranks, 0)


def _embedding_columns(layer: nn.Embedding, ranks: int, blocks: int) -> Splits:
    return _embedding(layer, ranks, 1)


def _out_channels(layer: _ConvNd, ranks: int, blocks: int) -> Splits:
    if isinstance(layer, _ConvTransposeNd):
        if layer.groups > 1:
            raise DivisionError("it is a transposed convolution with groups")
        _check("output channels", layer.out_channels, 1, ranks)
        return {"weight": Split(1), "bias": Split(0)}
    if layer.groups > 1:
        _check("groups", layer.groups, 1, ranks)
    _check("output channels", layer.out_channels, 1, ranks)
    return {"weight": Split(0), "bias": Split(0)}


def _in_channels(layer: _ConvNd, ranks: int, blocks: int) -> Splits:
    if layer.groups > 1:
        raise DivisionError("it has groups: 'channels' divides them")
    _check("input channels", layer.in_channels, 1, ranks)
    return {"weight": Split(0 if isinstance(layer, _ConvTransposeNd) else 1)}


def _norm_channels(layer: _NormBase, ranks: int, blocks: int) -> Splits:
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
        raise DivisionError("its running statistics are updated outside of its channels' rule")
    _check("channels", layer.num_features, 1, ranks)
    return {name: Split(0) for name in ("weight", "bias", "running_mean", "running_var")}


def _group_channels(layer: nn.GroupNorm, ranks: int, blocks: int) -> Splits:
    _check("groups", layer.num_groups, 1, ranks)
    return {"weight": Split(0), "bias": Split(0)}


def _heads(layer: nn.MultiheadAttention, ranks: int, blocks: int) -> Splits:
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        raise DivisionError("it has kdim, vdim, add_bias_kv or add_zero_attn")
    _check("heads", layer.num_heads, 1, ranks)
    return {"in_proj_weight": Split(0, 3), "in_proj_bias": Split(0, 3), "out_proj.weight": Split(1)}


def _hidden_units(layer: nn.RNNBase, ranks: int, blocks: int) -> Splits:
    if layer.proj_size:
        raise DivisionError("it has proj_size")
    _check("hidden units", layer.hidden_size, 1, ranks)
    return {name: Split(0, gates_of(layer)) for of in weight_names(layer) for name in of}


def _tokens(layer: nn.Module, ranks: int, blocks: int) -> Splits:
    return {}  # it computes with a part of the tokens, and holds everything


# by the class of a layer: its kinds, in the order of the dims of its weight
KINDS: list[tuple[type[nn.Module], dict[str, Callable[..., Splits]]]] = [
    (nn.MultiheadAttention, {"heads": _heads}),
    (nn.RNNBase, {"column": _hidden_units}),
    (nn.Embedding, {"vocabulary": _embedding_rows, "column": _embedding_columns}),
    (nn.Linear, {"column": _linear_columns, "row": _linear_rows}),
    (_ConvNd, {"channels": _out_channels, "row": _in_channels}),
    (nn.GroupNorm, {"channels": _group_channels}),
    (_NormBase, {"channels": _norm_channels}),
    *((kind, {SEQUENCE: _tokens}) for kind in (nn.LayerNorm, nn.RMSNorm, nn.Dropout)),
]
ALL_KINDS = ("column", "row", "vocabulary", "channels", "heads", SEQUENCE, REPLICATE)


def kinds_of(layer: nn.Module) -> list[str]:
    """Return the kinds that divide a layer; [] for a layer that can only be replicated."""
    return next((list(kinds) for kind, kinds in KINDS if isinstance(layer, kind)), [])


def parse_kind(text: str) -> tuple[str, int]:
    """Return kind and blocks of a text such as "column" or "column-3"; raises ValueError."""
    found = re.fullmatch(r"([a-z]+)(?:-([1-9][0-9]{0,3}))?", text)
    if found is None or found[1] not in ALL_KINDS or (found[2] and found[1] not in _BLOCK_KINDS):
        raise ValueError(f"{text!r} is no kind")
    return found[1], int(found[2] or 1)


_BLOCK_KINDS = ("column", "row")


def splits_of(layer: nn.Module, kind: str, blocks: int, ranks: int) -> Splits:
    """Return how a kind divides the tensors of a layer; {} to replicate it.

    Raises:
        DivisionError: The layer does not have this kind, or an extent is not divisible.
    """
    if kind == REPLICATE:
        return {}
    for of, kinds in KINDS:
        if isinstance(layer, of):
            if kind not in kinds:
                break
            found = kinds[kind](layer, ranks, blocks)
            return {name: split for name, split in found.items() if _has(layer, name)}
    raise DivisionError(f"a {type(layer).__name__} has no kind {kind!r}")


def _has(layer: nn.Module, name: str) -> bool:
    """Return whether a layer has a tensor; raises DivisionError for one that is computed."""
    path, _, own = name.rpartition(".")
    owner = layer.get_submodule(path)
    tensor = owner._parameters.get(own, owner._buffers.get(own))
    if tensor is None and getattr(owner, own, None) is not None:
        raise DivisionError(f"its {name} is computed from other parameters (a parametrization)")
    if tensor is not None and is_lazy(tensor):
        raise DivisionError(f"its {name} has no shape yet: run one forward before")
    return tensor is not None


def _check(what: str, extent: int, blocks: int, ranks: int) -> None:
    step = blocks * ranks
    if extent % step:
        near = sorted({max(extent // step, 1) * step, (extent // step + 1) * step})
        of = f" in {blocks} blocks" if blocks > 1 else ""
        raise DivisionError(
            f"its {extent:,} {what}{of} can't be divided by {ranks} ranks (nearest: "
            f"{' or '.join(f'{extent_near:,}' for extent_near in near)})"
        )
