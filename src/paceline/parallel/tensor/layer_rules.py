"""Which layers are divided: by rules, by names of dims, or found in the code's data flow.

Without rules, ``torch.fx`` follows the forward of each module that has layers as children, with
the children as black boxes. Where the input of a layer comes from the outputs of others through
functions of each element, attention or shapes, those are divided by columns (channels) and this one
by rows: one exchange for both. A choice decides only the time: operations follow the parts that
they get.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ...data.sampling.sample_order import preserve_random_states
from ..comparison.model_comparison import SavedAttributes
from .kinds import ALL_KINDS, REPLICATE, SEQUENCE, DivisionError, kinds_of, parse_kind, splits_of

Rules = Sequence[tuple[str, str]]


def kinds_from_rules(model: nn.Module, rules: Rules, ranks: int) -> dict[str, str]:
    """Return the kind of each module that rules divide.

    A rule with a module's whole name is preferred to a pattern.

    Raises:
        ValueError: A rule matches no module that can have its kind, rules contradict each other, or
            a layer can't be divided over the ranks.
    """
    found: dict[str, tuple[str, str]] = {}  # kind and pattern
    for pattern, kind in rules:
        _check_kind(pattern, kind)
        for name, module in _matching(model, pattern, kind):
            known = found.get(name)
            if known is not None and known[0] != kind and known[1] != name:
                if pattern == name:
                    known = None
                else:
                    raise _error(
                        f"{name} matches {known[1]!r} ({known[0]}) and {pattern!r} ({kind})",
                        f"a rule with its whole name, {name!r}: {kind!r}",
                    )
            if known is None:
                _check_division(name, module, kind, ranks)
                found[name] = (kind, pattern)
    return {name: kind for name, (kind, _) in found.items() if kind != REPLICATE}


def _check_kind(pattern: str, kind: str) -> None:
    try:
        parse_kind(kind)
    except ValueError:
        near = difflib.get_close_matches(kind, ALL_KINDS, n=1, cutoff=0.0)[0]
        raise _error(
            f"{pattern!r} has the kind {kind!r}; the kinds are {', '.join(ALL_KINDS)}",
            f"{pattern!r}: {near!r}",
        ) from None


def _matching(model: nn.Module, pattern: str, kind: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a pattern that can have the kind; raises ValueError for none."""
    named = [(name, module) for name, module in model.named_modules() if name]
    matched = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
    if not matched:
        layers = [name for name, module in named if kinds_of(module)]
        near = difflib.get_close_matches(pattern, layers or [n for n, _ in named], 1, 0.0)
        raise _error(f"{pattern!r} matches no module", f"{near[0] if near else '*'!r}")
    if kind == REPLICATE:
        return matched
    fitting = [(n, m) for n, m in matched if parse_kind(kind)[0] in kinds_of(m)]
    if not fitting:
        name, module = next(((n, m) for n, m in matched if kinds_of(m)), matched[0])
        kinds = [*kinds_of(module), REPLICATE]
        raise _error(
            f"{pattern!r}: {name} is a {type(module).__name__}, which has no kind {kind!r}",
            " or ".join(map(repr, kinds)),
        )
    return fitting


def _check_division(name: str, module: nn.Module, kind: str, ranks: int) -> None:
    try:
        splits_of(module, *parse_kind(kind), ranks)
    except DivisionError as error:
        raise _error(f"{name} can't be {kind!r}: {error}", f"{name!r}: 'replicate'") from None


def _error(problem: str, hint: str) -> ValueError:
    return ValueError(f"world.distribute: rules: {problem}. HINT: {hint}")


LARGE_SHARE = 1 / 16  # of all parameters: a single layer that is worth an exchange
_PASSED = (
    *("ReLU", "ReLU6", "GELU", "SiLU", "Tanh", "Sigmoid", "LeakyReLU", "ELU", "Hardtanh", "Mish"),
    *("Hardswish", "Softplus", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "Identity"),
    *("Flatten", "Unflatten", "MaxPool1d", "MaxPool2d", "MaxPool3d", "AvgPool1d", "AvgPool2d"),
    *("AvgPool3d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "Upsample"),
    *("AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AdaptiveMaxPool3d", "Softmax", "CELU", "SELU"),
)


@dataclass
class FoundRules:
    """The kinds that were found, and why layers are replicated.

    Attributes:
        kinds: By name of a module.
        reasons: By name of a module that could not be divided, why.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def find_rules(model: nn.Module, ranks: int) -> FoundRules:
    """Return rules for a model."""
    search = _Search(model, ranks)
    search.run()
    return search.found


class _Search:
    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model, ranks
        self.found = FoundRules()
        self.names = {module: name for name, module in model.named_modules()}
        self._users = _users_of_parameters(model)
        self._inside: set[nn.Module] = set()  # of a layer that is divided as a whole

    def run(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.MultiheadAttention):
                self._inside.update(module.modules())
                self._take(module, "heads")
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                self._pair([module.linear1], module.linear2, [])
        for module in self.model.modules():
            if module not in self._inside and _has_several_layers(module):
                for sources, layer, norms in _flows(module):
                    self._pair(sources, layer, norms)
        self._large_layers()

    def _take(self, layer: nn.Module, kind: str) -> bool:
        """Choose a kind for a layer, if it can be divided so."""
        name = self.names.get(layer, "")
        if not name or name in self.found.kinds or (layer in self._inside and kind != "heads"):
            return self.found.kinds.get(name) == kind
        try:
            splits = splits_of(layer, *parse_kind(kind), self.ranks)
        except DivisionError as error:
            self.found.reasons.setdefault(name, str(error))
            return False
        if not splits or not self._agrees(layer, name, splits):
            return False
        self.found.kinds[name] = kind
        return True

    def _agrees(self, layer: nn.Module, name: str, splits: dict[str, Any]) -> bool:
        """Return whether other modules that use the same parameters are divided alike."""
        for own, split in splits.items():
            parameter = getattr(layer, own, None) if "." not in own else None
            for other, other_name in self._users.get(id(parameter), ()):
                if other is layer:
                    continue
                kind = self.found.kinds.get(self.names[other])
                try:
                    others = {} if kind is None else splits_of(other, *parse_kind(kind), self.ranks)
                except DivisionError:
                    return False
                if others.get(other_name) != split:
                    return kind is None and self._takes_tied(other, other_name, split)
        return True

    def _takes_tied(self, other: nn.Module, name: str, split: Any) -> bool:
        """Divide a layer that has a tied weight in the same way."""
        kind = {nn.Embedding: "vocabulary", nn.Linear: "column"}.get(type(other))
        if kind is None or name != "weight" or split.dim != 0 or split.blocks != 1:
            return False
        self.found.kinds[self.names[other]] = kind
        return True

    def _pair(self, sources: list[nn.Module], last: nn.Module, norms: list[nn.Module]) -> None:
        """Divide layers by columns, and the one that takes their outputs by rows."""
        kinds = self.found.kinds
        group = [*sources, last, *norms]
        if any(kinds.get(self.names.get(layer, "")) not in (None,) for layer in group):
            return
        before = dict(kinds)
        done = all(self._take(source, _column(source, last)) for source in sources)
        done = done and self._take(last, "row")
        if not (done and all(self._take(norm, "channels") for norm in norms)):
            self.found.kinds = before

    def _large_layers(self) -> None:
        """Divide single layers with a large part of the parameters: embeddings, output layers."""
        total = sum(p.numel() for p in self.model.parameters())
        for module in self.model.modules():
            kind = {nn.Embedding: "vocabulary", nn.Linear: "column"}.get(type(module))
            weight = getattr(module, "weight", None) if kind else None
            if kind and weight is not None and weight.numel() >= LARGE_SHARE * total:
                self._take(module, kind)


def _column(source: nn.Module, last: nn.Module) -> str:
    if isinstance(source, _ConvNd):
        return "channels"
    assert isinstance(source, nn.Linear)
    width = last.in_features if isinstance(last, nn.Linear) else 0
    blocks = source.out_features // width if width and source.out_features % width == 0 else 1
    return f"column-{blocks}" if blocks in (2, 3) else "column"


def _users_of_parameters(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


def _is_layer(module: nn.Module) -> bool:
    is_plain_conv = isinstance(module, _ConvNd) and module.groups == 1
    return isinstance(module, nn.Linear) or is_plain_conv


def _has_several_layers(module: nn.Module) -> bool:
    return sum(_is_layer(child) for _, child in _near(module)) > 1


def _near(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module, and those of its lists and dicts."""
    for name, child in module.named_children():
        yield name, child
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for inner, module_inside in _near(child):
                yield f"{name}.{inner}", module_inside


class _Tracer(torch.fx.Tracer):
    """Follows one module's own code, with its children as black boxes."""

    def is_leaf_module(self, m: nn.Module, _: str) -> bool:
        return True


def _flows(module: nn.Module) -> Iterator[tuple[list[nn.Module], nn.Module, list[nn.Module]]]:
    """Yield layers whose outputs are the input of another one, that one, and norms between them."""
    graph = _graph_of(module)
    if graph is None:
        yield from _flows_in_order(module)
        return
    for node in graph.nodes:
        layer = _module_of(module, node)
        if layer is None or not _is_layer(layer) or not node.args:
            continue
        sources, norms = _sources(module, node)
        if sources and _fits(sources, layer):
            yield sources, layer, norms


def _graph_of(module: nn.Module) -> torch.fx.Graph | None:
    """Return the data flow of a module's own code; None if it can't be followed."""
    before = SavedAttributes([module])  # the code may keep what it computes
    with preserve_random_states():
        try:
            return _Tracer().trace(module)
        except Exception:  # such as a branch on a value
            return None
        finally:
            before.restore()


def _flows_in_order(
    module: nn.Module,
) -> Iterator[tuple[list[nn.Module], nn.Module, list[nn.Module]]]:
    """Yield neighbours in the order of registration whose sizes fit."""
    previous: nn.Module | None = None
    norms: list[nn.Module] = []
    for _, child in module.named_children():
        if isinstance(child, (_NormBase, nn.GroupNorm)):
            norms.append(child)
        elif _is_layer(child):
            is_pair = previous is not None and _fits([previous], child)
            if is_pair and previous is not None and _width_in(previous) != _width_out(previous):
                yield [previous], child, norms
                previous = None
            else:
                previous = child
            norms = []
        elif type(child).__name__ not in _PASSED:
            previous = None


def _module_of(module: nn.Module, node: torch.fx.Node) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _sources(module: nn.Module, consumer: torch.fx.Node) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers from which a node's input comes, and the norms between them."""
    sources: dict[nn.Module, None] = {}
    norms: dict[nn.Module, None] = {}
    waiting, seen = [consumer.args[0]], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, torch.fx.Node) or node in seen:
            continue
        seen.add(node)
        child = _module_of(module, node)
        if child is None:
            waiting += node.all_input_nodes
        elif _is_layer(child):
            sources[child] = None
        elif isinstance(child, (_NormBase, nn.GroupNorm, _ConvNd)):
            norms[child] = None
            waiting += node.all_input_nodes
        elif type(child).__name__ in _PASSED:
            waiting += node.all_input_nodes
        else:
            return [], []  # such as a LayerNorm, which needs whole rows
    return list(sources), list(norms)


def _width_in(layer: Any) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)


def _width_out(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _fits(sources: list[nn.Module], layer: nn.Module) -> bool:
    """Return whether the widths of the sources are those of the layer's input."""
    width = _width_in(layer)
    if layer in sources:
        return False
    for source in sources:
        out = _width_out(source)
        is_conv = isinstance(source, _ConvNd)
        if is_conv != isinstance(layer, _ConvNd) and (not is_conv or width % out):
            return False
        if out > width and out % width:
            return False
        is_part = is_conv or len(sources) > 1  # heads of keys that several queries share
        if out < width and (width % out or not is_part):
            return False
    return True


# Rules from names of dims, as in Mesh-TensorFlow (Shazeer et al., arXiv 1811.02084).
#
# Dims of weights get names, and one line says which name lies on the tensor axis.

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
            raise _dims_error(f"axes: no weight has a dim {name!r}", f"{near}:tensor")
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
        layers = [(name, module) for name, module in matched if _kinds_of_dims(module)]
        if not layers:
            near = _nearest(pattern, [name for name, module in modules if _kinds_of_dims(module)])
            kinds = sorted({type(module).__name__ for _, module in matched})
            what = f"matches only {', '.join(kinds)}, without dims that can be divided"
            raise _dims_error(f"{pattern!r} {what if kinds else 'matches no layer'}", repr(near))
        for name, layer in layers:
            if name in dims and pattern != name:
                continue
            _, other, known = found.setdefault(name, (layer, pattern, text))
            if known.split() != text.split():
                raise _dims_error(
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
            raise _dims_error(f"axes: {text!r} names no dim and axis", f"{name or 'hidden'}:{near}")
        if _AXES[axis] == (name == BATCH):
            right = "data" if name == BATCH else "tensor"
            raise _dims_error(f"axes: {name!r} can't lie on the axis {axis}", f"{name}:{right}")
        if name != BATCH:
            found.append(name)
    return found


def _parse(text: str) -> list[tuple[int, str]]:
    """Return blocks and name of each dim of a text such as "3*heads width"."""
    found = []
    for word in text.split():
        match = _NAME.fullmatch(word)
        if match is None:
            raise _dims_error(
                f"dims: {word!r} is no name of a dim", "'hidden width', '3*heads width'"
            )
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
    kinds, shape = _kinds_of_dims(layer), _shape(layer)
    if len(dims) > len(shape):
        raise _dims_error(
            f"{name} is a {type(layer).__name__}, whose weight has the dims {shape}: "
            f"{len(dims)} names are too many",
            " ".join(word for _, word in dims[: len(shape)]),
        )
    found: list[str] = []
    for at, (blocks, word) in enumerate(dims):
        size = shape[at] // blocks
        known = sizes.setdefault(word, (size, name))
        if known[0] != size or shape[at] % blocks:
            raise _dims_error(
                f"the dim {word!r} has {known[0]:,} elements in {known[1]}, and "
                f"{shape[at] / blocks:,g} in {name}",
                "another name for one of them",
            )
        if word in divided:
            if at >= len(kinds):
                raise _dims_error(
                    f"dim {at} ({word!r}) of {name} can't be divided: it is a "
                    f"{type(layer).__name__}",
                    "the names of its channels on the tensor axis",
                )
            found.append(f"{kinds[at]}-{blocks}" if blocks > 1 else kinds[at])
    if len(found) > 1:
        words = [word for _, word in dims if word in divided]
        raise _dims_error(
            f"{name} has two divided dims, {' and '.join(words)}",
            f"another name for one of them in this layer, or only {words[0]}:tensor",
        )
    return found[0] if found else None


def _kinds_of_dims(layer: nn.Module) -> list[str]:
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


def _dims_error(problem: str, hint: str) -> ValueError:
    return ValueError(f"paceline.divide_dims: {problem}. HINT: {hint}")
