"""Tensor parallelism as a strategy: operators are divided over the tensor axis."""

import re
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ...cost.layout import AXIS_WORDS, Layout
from ...knobs.knob import KnobResult
from ...optim.norms import GlobalBatchNorm
from ...plurals import counted
from ...record.hooks.phases import UncopiedHook
from ..divided.module_names import note_names
from ..optimizer_check import check_steps_of_pieces
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .exchange import TensorAxis, scattered
from .kinds import SEQUENCE, parse_kind, splits_of
from .layer_rules import FoundRules, find_rules, kinds_from_rules
from .parameters import Views, cut_states, divide_module
from .rules import layers, products  # noqa: F401 - registers them
from .split_tensor import SplitTensor
from .splits import Split
from .tensor_parallel_model import TensorParallelModel

TOKEN_DIM = 1
_WITHOUT_RULES = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)


MAX_LINES = 10


class TensorParallel(ParallelStrategy):
    """Layers by columns, rows, vocabulary, channels or heads on the ranks of the tensor axis."""

    axes = frozenset({"tp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        self._found = FoundRules()

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        ranks, layout = self._ranks, self.request.layout
        others = [axis for axis in layout.divided_axes if axis not in ("tp", "pp")]
        if others:
            raise ValueError(
                f"world.distribute: layout={str(layout.without_options)!r}: {others[0]} together "
                f"with tp is not implemented yet. HINT: layout='tp{ranks}' or "
                f"layout='{others[0]}{layout.extents[others[0]] or ''}'"
            )
        if ranks == 1:
            return
        if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
            raise ValueError(
                "world.distribute: a compiled model can't be divided over the tensor axis. HINT: "
                "world.distribute(model, ...) without torch.compile"
            )
        for name, module in model.named_modules():
            if isinstance(module, (nn.SyncBatchNorm, GlobalBatchNorm)):
                raise ValueError(
                    f"world.distribute: layout={str(layout.without_options)!r}: {name} is a "
                    f"{type(module).__name__}, which would count the samples that ranks of the "
                    "tensor axis share several times. HINT: nn.BatchNorm2d with norm='local'"
                )
        rules = self.request.layout.rule_pairs
        if rules:
            self._found = FoundRules(kinds_from_rules(model, rules, ranks))
        else:
            self._found = find_rules(model, ranks)
        other = f"zero{layout.zero}" if layout.zero else "pp" if layout.pp != 1 else ""
        if not other:
            self._found.kinds |= requested_modules(model, self._found.kinds)
        tokens = next((name for name, kind in self._found.kinds.items() if kind == SEQUENCE), None)
        if other and tokens is not None:
            raise ValueError(
                f"world.distribute: rules: {tokens!r}: 'sequence' together with {other} is not "
                "implemented: sharded blocks and stages exchange whole tensors. HINT: a layout "
                f"without {other}, or rules without 'sequence'"
            )
        if not self._found.kinds:
            raise ValueError(f"world.distribute: {self._nothing(model)}")
        if optimizer is not None:
            check_steps_of_pieces(optimizer)

    @property
    def _ranks(self) -> int:
        layout, mesh = self.request.layout, self.request.mesh
        return layout.tp or layout.over(mesh.size).tp or 1

    def _nothing(self, model: nn.Module) -> str:
        reasons = [f"{name}: {why}" for name, why in self._found.reasons.items()]
        because = f" ({reasons[0]})" if reasons else ""
        return (
            f"no layer of the {type(model).__name__} is divided over {self._ranks} ranks{because}. "
            f"HINT: paceline.Layout(tp={self._ranks}, rules={{'NAME': 'column'}}) with the name of "
            "a large layer, or a layout without tp"
        )

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        mesh, module = self.request.mesh, model.module
        if self._ranks == 1:
            return model
        axis = TensorAxis(mesh.group(AXIS_WORDS["tp"]))
        views = Views(axis)
        before = sum(p.nbytes for p in module.parameters())
        by_module: dict[nn.Module, dict[str, Split]] = {}
        for name, kind in self._found.kinds.items():
            layer = module.get_submodule(name)
            if not any(True for _ in layer.parameters()):
                continue  # on another stage of a pipeline
            for tensor, split in splits_of(layer, *parse_kind(kind), axis.size).items():
                path, _, own = tensor.rpartition(".")
                by_module.setdefault(layer.get_submodule(path), {})[own] = split
        splits = _by_names(module, by_module)
        _check_tied(module, splits)
        note_names(module)
        for owner, own_splits in by_module.items():
            divide_module(owner, own_splits, views)
        for name, kind in self._found.kinds.items():
            if kind == SEQUENCE:
                axis.token_dim = TOKEN_DIM
                divide_tokens(module.get_submodule(name), name, views, self.request.say)
        if optimizer is not None:
            cut_states(optimizer, axis)
        after = sum(p.nbytes for p in module.parameters())
        self.request.say(self._summary(module, before, after))
        return TensorParallelModel(
            model, mesh, views, splits, tuple(self._found.kinds.items()), self.request
        )

    def _summary(self, module: nn.Module, before: int, after: int) -> str:
        """Return what was chosen, in at most MAX_LINES lines."""
        kinds, layout = self._found.kinds, self.request.layout
        tensor = Layout(tp=self._ranks)
        share = after / before if before else 1.0
        lines = [
            f"layout={str(layout.without_options)!r}: {counted(len(kinds), 'layer')} divided over "
            f"{tensor.tp} ranks of the tensor axis, each with {share:.0%} of the parameters"
        ]
        shown = [f"  {pattern}: {kind}" for pattern, kind in patterns_of(kinds).items()]
        shown += [f"  {name}: replicate ({why})" for name, why in self._found.reasons.items()]
        most = MAX_LINES - 2
        lines += (
            shown
            if len(shown) <= most
            else [*shown[: most - 1], f"  and {len(shown) - most + 1} more"]
        )
        if not layout.rule_pairs:
            lines.append(
                "  to change them: print(world.layouts[0].rules), and give them back in rules="
            )
        return "\n".join(lines)


def patterns_of(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return kinds by patterns: a name's first number is ``*`` where all have one kind."""
    grouped: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        grouped.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1), {})[name] = kind
    found: dict[str, str] = {}
    for pattern, of in grouped.items():
        if len(set(of.values())) == 1 and len(of) > 1:
            found[pattern] = next(iter(of.values()))
        else:
            found |= of
    return found


def _by_names(
    module: nn.Module, by_module: Mapping[nn.Module, Mapping[str, Split]]
) -> dict[str, Split]:
    """Return the splits by all names of parameters and buffers.

    A module that the model has several times has several names, and checkpoints have all of them.
    """
    return {
        f"{name}.{own}" if name else own: split
        for name, child in module.named_modules(remove_duplicate=False)
        for own, split in by_module.get(child, {}).items()
    }


def _check_tied(module: nn.Module, splits: Mapping[str, Split]) -> None:
    """Raise ValueError where modules that share a parameter divide it differently."""
    known: dict[int, tuple[str, Split | None]] = {}
    for owner, child in module.named_modules():
        for own, parameter in child._parameters.items():
            if parameter is None:
                continue
            name = f"{owner}.{own}" if owner else own
            split = splits.get(name)
            first, other = known.setdefault(id(parameter), (name, split))
            if other != split:
                raise ValueError(
                    f"world.distribute: rules: {first} and {name} are one parameter, which the "
                    "rules divide in two ways. HINT: 'vocabulary' for an embedding and 'column' "
                    "for the output layer that has its weight, or 'replicate' for both"
                )


# Norms and dropout that compute with a part of the tokens (Korthikanti et al., arXiv 2205.05198).
# Tensors [batch, tokens, features] between pairs of layers have the same value on all ranks. With
# a rule "sequence" each rank computes them for its part of the tokens: the sums of ``row`` layers
# and of ``vocabulary`` embeddings are divided (reduce-scatter instead of all-reduce), and
# ``column`` layers gather their input.


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
    is_said = False

    def before(_: nn.Module, args: Any) -> Any:
        nonlocal is_said
        x = args[0] if args else None
        if views.are_whole or isinstance(x, SplitTensor) or not isinstance(x, torch.Tensor):
            return None
        axis, split = views.axis, Split(TOKEN_DIM)
        if x.dim() != 3 or not split.divides(x.shape[TOKEN_DIM], axis.size):
            if not is_said:
                is_said = True
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
