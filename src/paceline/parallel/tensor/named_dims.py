"""Rules from names of dims, as in Mesh-TensorFlow (Shazeer et al., arXiv 1811.02084).

Dims of weights get names, and one line says which name lies on the tensor axis.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from .kinds import SEQUENCE, kinds_of

_AXES = {"tensor": True, "tp": True, "data": False, "dp": False}
BATCH = "batch"
_NAME = re.compile(r"(?:([1-9][0-9]{0,3})\*)?([A-Za-z_]\w*)")


def divide_dims(model: nn.Module, dims: Mapping[str, str], axes: str) -> dict[str, str]:
    """Return the rules of a layout from names of dims of weights.

    Args:
        dims: By a pattern over module names, the names of the dims of its weight in their order:
            "hidden width" for a linear layer of ``hidden`` outputs and ``width`` inputs,
            "vocabulary width" for an embedding, "out in" for a convolution, "hidden" for recurrent
            layers and norms, "heads" for ``nn.MultiheadAttention``. "3*heads width": three blocks
            of heads.
        axes: "hidden:tensor; vocabulary:tensor": the dims that are divided over the tensor axis.
            "batch:data" may be among them, as data ranks divide the batch in any layout.

    Raises:
        ValueError: A name, an axis or a module is unknown, a name has two sizes, or a weight has
            two divided dims.
    """
    divided = _divided_names(axes)
    used = {name for text in dims.values() for _, name in _parse(text)}
    for name in divided:
        if name not in used:
            near = _nearest(name, used)
            raise _error(f"axes: no weight has a dim {name!r}", f"{near}:tensor")
    sizes: dict[str, tuple[int, str]] = {}
    rules: dict[str, str] = {}
    for name, (layer, _, text) in _named_layers(model, dims).items():
        kind = _kind_of(name, layer, _parse(text), divided, sizes)
        if kind is not None:
            rules[name] = kind
    return rules


def _named_layers(
    model: nn.Module, dims: Mapping[str, str]
) -> dict[str, tuple[nn.Module, str, str]]:
    """Return the layers with names of dims, with pattern and names. A whole name is preferred."""
    modules = [(name, module) for name, module in model.named_modules() if name]
    found: dict[str, tuple[nn.Module, str, str]] = {}
    for pattern, text in dims.items():
        matched = [(name, module) for name, module in modules if fnmatchcase(name, pattern)]
        layers = [(name, module) for name, module in matched if _kinds(module)]
        if not layers:
            near = _nearest(pattern, [name for name, module in modules if _kinds(module)])
            kinds = sorted({type(module).__name__ for _, module in matched})
            what = f"matches only {', '.join(kinds)}, without dims that can be divided"
            raise _error(f"{pattern!r} {what if kinds else 'matches no layer'}", repr(near))
        for name, layer in layers:
            if name in dims and pattern != name:
                continue
            _, other, known = found.setdefault(name, (layer, pattern, text))
            if known.split() != text.split():
                raise _error(
                    f"{name} matches {other!r} ({known}) and {pattern!r} ({text})",
                    f"its whole name: {name!r}: {text!r}",
                )
    return found


def _divided_names(axes: str) -> list[str]:
    found = []
    for text in filter(None, re.split(r"\s*[;,]\s*", axes.strip())):
        name, _, axis = (part.strip() for part in text.partition(":"))
        if axis not in _AXES or not _NAME.fullmatch(name):
            near = _nearest(axis, _AXES)
            raise _error(f"axes: {text!r} names no dim and axis", f"{name or 'hidden'}:{near}")
        if _AXES[axis] == (name == BATCH):
            right = "data" if name == BATCH else "tensor"
            raise _error(f"axes: {name!r} can't lie on the axis {axis}", f"{name}:{right}")
        if name != BATCH:
            found.append(name)
    return found


def _parse(text: str) -> list[tuple[int, str]]:
    """Return blocks and name of each dim of a text such as "3*heads width"."""
    found = []
    for word in text.split():
        match = _NAME.fullmatch(word)
        if match is None:
            raise _error(f"dims: {word!r} is no name of a dim", "'hidden width', '3*heads width'")
        found.append((int(match[1] or 1), match[2]))
    return found


def _kind_of(
    name: str,
    layer: nn.Module,
    dims: list[tuple[int, str]],
    divided: list[str],
    sizes: dict[str, tuple[int, str]],
) -> str | None:
    """Return the kind that divides a layer; None if none of its dims is divided."""
    kinds, shape = _kinds(layer), _shape(layer)
    if len(dims) > len(shape):
        raise _error(
            f"{name} is a {type(layer).__name__}, whose weight has the dims {shape}: "
            f"{len(dims)} names are too many",
            " ".join(word for _, word in dims[: len(shape)]),
        )
    found: list[str] = []
    for at, (blocks, word) in enumerate(dims):
        size = shape[at] // blocks
        known = sizes.setdefault(word, (size, name))
        if known[0] != size or shape[at] % blocks:
            raise _error(
                f"the dim {word!r} has {known[0]:,} elements in {known[1]}, and "
                f"{shape[at] / blocks:,g} in {name}",
                "another name for one of them",
            )
        if word in divided:
            if at >= len(kinds):
                raise _error(
                    f"dim {at} ({word!r}) of {name} can't be divided: it is a "
                    f"{type(layer).__name__}",
                    "the names of its channels on the tensor axis",
                )
            found.append(f"{kinds[at]}-{blocks}" if blocks > 1 else kinds[at])
    if len(found) > 1:
        words = [word for _, word in dims if word in divided]
        raise _error(
            f"{name} has two divided dims, {' and '.join(words)}",
            f"another name for one of them in this layer, or only {words[0]}:tensor",
        )
    return found[0] if found else None


def _kinds(layer: nn.Module) -> list[str]:
    """Return the kinds that divide the first dims of a layer's weight, in the order of dims."""
    kinds = [kind for kind in kinds_of(layer) if kind != SEQUENCE]
    return kinds[::-1] if isinstance(layer, _ConvTransposeNd) else kinds


def _shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the extents that names stand for."""
    if isinstance(layer, nn.MultiheadAttention):
        return (layer.num_heads,)
    if isinstance(layer, nn.RNNBase):
        return (layer.hidden_size,)
    if isinstance(layer, (_NormBase, nn.GroupNorm)):
        return (layer.num_features if isinstance(layer, _NormBase) else layer.num_channels,)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return tuple(weight.shape)


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)
    return near[0] if near else word


def _error(problem: str, hint: str) -> ValueError:
    return ValueError(f"paceline.divide_dims: {problem}. HINT: {hint}")
