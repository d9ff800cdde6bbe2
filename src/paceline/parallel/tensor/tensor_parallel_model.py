"""A model whose layers are divided over the tensor axis, as the training loop sees it.

In its first forward, each operation with a rule is computed twice on each rank: with pieces, and
with whole tensors. Results and gradients are compared in float64, so that only rounding may differ.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten, tree_map

from ...comm.group_device import device_of
from ...record.hooks.phases import UncopiedHook
from ..comparison.model_comparison import (
    DividedModelError,
    Division,
    ModelComparison,
    compare_model,
)
from ..divided.divided_tensor import NO_RULE, Rule, function_name, whole_outputs
from ..divided.module_names import place
from ..memory_budget import GIB, available_bytes
from ..mesh import TENSOR, Mesh
from ..replicated.replica import has_tensor, own_methods
from ..strategy.distributed_model import DistributedModel, Part
from ..strategy.parallel_strategy import DistributionRequest
from ..strategy.training_step import TrainingStep
from .exchange import TensorAxis
from .parameters import Views
from .split_tensor import SplitTensor, Watch, memory_order, watching
from .splits import Split

# of the largest element
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
SAMPLES = 4  # of a large input
MAX_FLOAT64_BYTES = 4 << 30  # of one operation; larger ones keep their dtype
_CUT_SAMPLES = {F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}


class Comparison(Watch):
    """Compare each kind of operation once.

    Attributes:
        operations: Number of operations that were compared.
        seconds: Time of the comparisons.
        largest: The largest relative difference.
        gathered: By place and function, the bytes of tensors that had to be gathered.
    """

    def __init__(self) -> None:
        self.operations, self.seconds, self.largest = 0, 0.0, 0.0
        self.gathered: dict[str, int] = {}
        self._known: set[Any] = set()

    def before(self, axis: TensorAxis, rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
        if func in _NOT_COMPARED:
            return
        key = (func, str(tree_map(_signature, (args, kwargs))))
        if key in self._known:
            return
        self._known.add(key)
        start = time.perf_counter()
        with watching(Watch()), torch.autocast(axis_device(args, kwargs), enabled=False):
            difference = _compare(axis, rule, func, args, kwargs)
        self.seconds += time.perf_counter() - start
        if difference is not None:
            self.operations += 1
            self.largest = max(self.largest, difference)

    def gathers(self, axis: TensorAxis, func: Any, tensors: list[SplitTensor]) -> None:
        own = f"{function_name(func)}{place()}"
        count = sum(tensor.numel() * tensor.local.element_size() for tensor in tensors)
        self.gathered[own] = self.gathered.get(own, 0) + count


_NOT_COMPARED = {torch.autograd.grad}


def axis_device(args: Any, kwargs: Any) -> str:
    """Return the type of device of the first tensor."""
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, SplitTensor):
            return leaf.local.device.type
    return "cpu"


def _signature(value: Any) -> Any:
    if isinstance(value, SplitTensor):
        return ("split", tuple(value.shape), value.dtype, value.division, value.requires_grad)
    if isinstance(value, torch.Tensor):
        return ("plain", tuple(value.shape), value.dtype, value.requires_grad)
    return str(value)


class _Copies:
    """Arguments of one call as new leaves: pieces or whole tensors."""

    def __init__(self, dtype: torch.dtype | None, samples: int | None, always: bool) -> None:
        self.dtype, self.samples, self.always = dtype, samples, always
        self.leaves: list[tuple[torch.Tensor, SplitTensor | None]] = []
        self.given: list[torch.Tensor] = []  # to the function, which may change them

    def pieces(self, value: Any) -> Any:
        if isinstance(value, SplitTensor):
            leaf = self._leaf(value.local, value.division.dim != 0)
            self.leaves.append((leaf, value))
            return self._give(SplitTensor.of(leaf.clone(), value.division, value.axis))
        return self._plain(value)

    def whole(self, value: Any) -> Any:
        if isinstance(value, SplitTensor):
            joined = value.division.join(value.axis.pieces(value.local.detach()))
            whole = torch.empty_permuted(  # numbers of a dropout are drawn in this order
                joined.shape, memory_order(value.local), dtype=joined.dtype, device=joined.device
            ).copy_(joined)
            leaf = self._leaf(whole.requires_grad_(value.requires_grad), value.division.dim != 0)
            self.leaves.append((leaf, None))
            return self._give(leaf.clone())
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = self._leaf(value, True)
        self.leaves.append((leaf, None))
        return self._give(leaf.clone())

    def _give(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(tensor)
        return tensor

    def _leaf(self, value: torch.Tensor, may_cut: bool) -> torch.Tensor:
        if self.samples is not None and not self.leaves and value.dim() > 1 and may_cut:
            value = value[: self.samples]  # the first argument is the input
        has_gradient = value.requires_grad or self.always
        value = value.detach()
        if not value.is_floating_point():
            return value.clone()
        dtype = value.dtype if self.dtype is None else self.dtype
        return value.to(dtype, copy=True).requires_grad_(has_gradient)


def _compare(axis: TensorAxis, rule: Rule, func: Any, args: Any, kwargs: Any) -> float | None:
    """Compare one call; return the largest relative difference, None if the rule does not apply.

    Raises:
        DividedModelError: The results differ, on any rank.
    """
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    is_large = sum(tensor.numel() for tensor in tensors) * 8 > MAX_FLOAT64_BYTES
    dtype = None if is_large else torch.float64
    samples = SAMPLES if func in _CUT_SAMPLES else None
    always = not torch.is_grad_enabled() and func is not F.batch_norm
    split, plain = _Copies(dtype, samples, always), _Copies(dtype, samples, always)
    devices = [torch.cuda.current_device()] if axis_device(args, kwargs) == "cuda" else []
    with torch.enable_grad():
        given, named = tree_map(split.pieces, (args, kwargs))
        with torch.random.fork_rng(devices):
            found = rule(func, *given, **named)
        if found is NO_RULE:
            return None
        given, named = tree_map(plain.whole, (args, kwargs))
        with torch.random.fork_rng(devices):
            expected = func(*given, **named)
        worst, where, precision = _differences(axis, found, expected, split, plain)
    limit = TOLERANCES.get(precision, 1e-4)
    numbers = axis.pieces(torch.tensor([worst], dtype=torch.float64, device=device_of(axis.group)))
    largest = max(float(number) for number in numbers)
    if not largest <= limit:
        raise DividedModelError(
            f"{function_name(func)}{place()}: {where or 'a result on another rank'} differs from "
            f"that of the whole tensors by {largest:.2g} (relative), so that the tensor axis can't "
            "divide it. HINT: the rule 'replicate' for this module, in "
            "paceline.Layout(rules={...})"
        )
    return largest


def _differences(
    axis: TensorAxis, found: Any, expected: Any, split: _Copies, plain: _Copies
) -> tuple[float, str, torch.dtype]:
    """Return the largest relative difference of results and gradients, what differs, a dtype."""
    ours = [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]
    theirs = [leaf for leaf in tree_flatten(expected)[0] if isinstance(leaf, torch.Tensor)]
    precision = torch.float64
    if len(ours) != len(theirs):
        return float("inf"), "the number of results", precision
    worst, where = 0.0, ""
    pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(1)
    for mine, other in zip(ours, theirs, strict=True):
        whole = _joined(mine)
        if whole.is_floating_point() and whole.dtype != torch.float64:
            precision = whole.dtype
        difference = _relative(whole, other)
        if not difference <= worst:
            worst, where = difference, "the result"
        if other.requires_grad and other.is_floating_point():
            direction = torch.randn(other.shape, generator=generator, dtype=torch.float64)
            direction = direction.to(other.device, other.dtype)
            own = direction
            if isinstance(mine, SplitTensor):
                own = mine.division.cut(direction, axis.rank, axis.size)
                mine = mine.local
            if not mine.requires_grad:
                return float("inf"), "the result, which has no gradient,", precision
            pairs.append((mine, own, other, direction))
    for number, (mine, other) in enumerate(zip(split.given, plain.given, strict=True)):
        difference = _relative(_joined(mine), other)
        if not difference <= worst:
            worst, where = difference, f"argument {number + 1} afterwards"
    if not pairs or not worst < float("inf"):
        return worst, where, precision
    own_leaves = [leaf for leaf, _ in split.leaves if leaf.requires_grad]
    whole_leaves = [leaf for leaf, _ in plain.leaves if leaf.requires_grad]
    of = [value for leaf, value in split.leaves if leaf.requires_grad]
    mine_, own_, other_, direction_ = zip(*pairs, strict=True)
    got = torch.autograd.grad(mine_, own_leaves, own_, allow_unused=True)
    wanted = torch.autograd.grad(other_, whole_leaves, direction_, allow_unused=True)
    for number, (value, own_leaf, whole_leaf, a, b) in enumerate(
        zip(of, own_leaves, whole_leaves, got, wanted, strict=True)
    ):
        a = torch.zeros_like(own_leaf) if a is None else a
        b = torch.zeros_like(whole_leaf) if b is None else b
        a = a.to_dense() if a.is_sparse else a
        b = b.to_dense() if b.is_sparse else b
        a = a if value is None else value.division.join(axis.pieces(a))
        difference = _relative(a, b)
        if not difference <= worst:
            worst, where = difference, f"the gradient of argument {number + 1}"
    return worst, where, precision


def _joined(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, SplitTensor):
        with torch.no_grad():
            return value.division.join(value.axis.pieces(value.local.detach()))
    return value.detach()


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in parts of the largest element."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    if not found.is_floating_point() and not found.is_complex():
        return 0.0 if torch.equal(found, expected) else float("inf")
    found, expected = found.detach(), expected.detach()
    equal = (found == expected) | (found.isnan() & expected.isnan())
    difference = (found - expected).abs().masked_fill(equal, 0).max()
    finite = expected.abs().masked_fill(~expected.isfinite(), 0)
    value = float(difference / finite.max().clamp(min=1e-30)) if float(difference) else 0.0
    return value if value == value else float("inf")


MEMORY_FACTOR = 3  # whole parameters, their gradients, and activations


class TensorDivision(Division):
    """One forward of a model whose operators are divided.

    Args:
        forward: Runs the model's forward.

    Attributes:
        operations: The comparison of operations.
    """

    subject = "the model that is divided over the tensor axis"
    cause = (
        "Each operation by itself was right, so code of the model uses a part as if it were whole. "
        "HINT: the rule 'replicate' for the layers around it, in paceline.Layout(rules={...})"
    )

    def __init__(self, model: nn.Module, views: Views, forward: Callable[[], Any]) -> None:
        self.model, self.views, self.forward = model, views, forward
        self.axis = views.axis
        self.device = device_of(self.axis.group).type
        self.operations = Comparison()

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.axis.pieces(tensor)

    def divided(self) -> Any:
        with watching(self.operations):
            return whole_outputs(self.forward())

    def whole(self) -> Any:
        return whole_outputs(self.forward())

    @contextmanager
    def as_whole(self, takes_gradients: bool) -> Iterator[None]:
        with watching(Watch()):
            if takes_gradients:
                with self.views.whole_tensors():
                    yield
                return
            self.views.are_whole = True  # FSDP gives modules their parameters itself
            try:
                yield
            finally:
                self.views.are_whole = False

    def is_split(self, parameter: nn.Parameter) -> bool:
        return getattr(parameter, "_paceline_split", None) is not None

    def mean_magnitude(self, parameter: nn.Parameter) -> torch.Tensor:
        own = super().mean_magnitude(parameter)
        return self.axis.sum(own) / self.axis.size if self.is_split(parameter) else own

    @property
    def rank(self) -> int:
        return self.axis.rank

    def why_not(self) -> str:
        tensors = [*self.model.parameters()]
        device = next((p.device for p in tensors), torch.device("cpu"))
        needed = sum(p.nbytes * (self.axis.size if self.is_split(p) else 1) for p in tensors)
        missing = MEMORY_FACTOR * needed > available_bytes(device)
        flag = torch.tensor([float(missing)], device=self.device)
        if not any(float(flag_of_rank) for flag_of_rank in self.pieces(flag)):
            return ""
        return f"its whole parameters ({needed / GIB:.1f} GiB) do not fit on a rank"


class TensorParallelModel(DistributedModel):
    """A model of which each rank of the tensor axis holds pieces of some layers.

    Attributes:
        views: How the module's code sees pieces.
        splits: By the names of parameters and buffers, how they are divided.
        rules: The rules that divide it.
    """

    def __init__(
        self,
        inner: DistributedModel,
        mesh: Mesh,
        views: Views,
        splits: Mapping[str, Split],
        rules: tuple[tuple[str, str], ...],
        request: DistributionRequest,
    ) -> None:
        super().__init__(inner.module, inner)
        self.mesh, self.views, self.splits = mesh, views, splits
        self._rules = rules
        self._request = request
        self._is_inside = False  # a forward, or a method that computes like it
        self._compared: set[bool] = set()  # training, evaluation
        self._is_loss_compared = not request.compare
        self._takes_parts = False  # the loss that follows
        self._parts: SplitTensor | None = None  # outputs of which it takes the parts
        self._wrap(inner.module)

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        return self._rules

    def parted_axes(self, name: str) -> frozenset[str]:
        own = frozenset({TENSOR}) if name in self.splits else frozenset()
        return own | super().parted_axes(name)

    def part_of(self, name: str) -> Part | None:
        split = self.splits.get(name)
        if split is None:
            return super().part_of(name)
        tensor = self._tensor(name)
        axis, local = self.views.axis, tuple(tensor.shape)
        offset = tuple(
            axis.rank * n // split.blocks if dim == split.dim else 0 for dim, n in enumerate(local)
        )
        whole = split.whole_shape(local, axis.size)
        return Part(whole, offset, local, split.dim, split.blocks)

    def _tensor(self, name: str) -> Any:
        owner, _, own = name.rpartition(".")
        module = self.module.get_submodule(owner)
        found = module._parameters.get(own)
        return found if found is not None else module._buffers[own]

    # calls

    def _wrap(self, module: nn.Module) -> None:
        """Give the script whole outputs, and compare the first forward."""
        module.register_forward_pre_hook(UncopiedHook(self._before), with_kwargs=True)
        module.register_forward_hook(UncopiedHook(self._after), always_call=True)
        kind = type(module)
        space: dict[str, Any] = {n: self._choosing(getattr(kind, n)) for n in own_methods(module)}
        space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind.__name__, (kind,), space)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_inside:
            self._compare(module, lambda: module.forward(*args, **kwargs))
            self._is_inside = True

    def _after(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        self._is_inside = False
        if self._takes_parts and isinstance(outputs, SplitTensor):
            self._parts = outputs
            return outputs.local  # a plain tensor, for hooks of DDP and FSDP
        return whole_outputs(outputs)

    def run_step(self, step: TrainingStep) -> torch.Tensor:
        if not _computes_on_parts(step.loss) or _has_hooks(step.module, self.module):
            return super().run_step(step)
        self._takes_parts, self._parts = True, None
        try:
            outputs, parts = step.call(), self._parts
        finally:
            self._takes_parts, self._parts = False, None
        if parts is not None:
            outputs = SplitTensor.of(outputs, parts.division, parts.axis)
        with self._comparing_loss():
            mean, weight = step.loss_of(outputs)
        with step.backward(mean):
            step.scaled(mean, weight).backward()
        return mean.detach()

    @contextmanager
    def _comparing_loss(self) -> Iterator[None]:
        """Compare the first loss on parts with that of whole outputs."""
        if self._is_loss_compared:
            yield
            return
        self._is_loss_compared = True
        with watching(Comparison()):
            yield

    def _choosing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(module: nn.Module, *args: Any, **options: Any) -> Any:
            if self._is_inside or not has_tensor(args, options):
                return plain(module, *args, **options)
            self._compare(module, lambda: plain(module, *args, **options))
            self._is_inside = True
            try:
                return whole_outputs(plain(module, *args, **options))
            finally:
                self._is_inside = False

        return method

    def _compare(self, module: nn.Module, forward: Callable[[], Any]) -> None:
        """Compare the first forward in training, and the first one in evaluation."""
        is_done = module is not self.module or module.training in self._compared
        if is_done or not self._request.compare:
            return
        self._compared.add(module.training)
        self._is_inside = True
        try:
            takes_gradients = not self._request.layout.zero
            division = TensorDivision(module, self.views, forward)
            found = compare_model(module, division, takes_gradients)
        finally:
            self._is_inside = False
        self._request.say(_summary(found, division.operations, module.training))


def _computes_on_parts(loss: Any) -> bool:
    """Return whether a loss has a rule for outputs of which ranks hold parts.

    Other ones are the script's: they may use outputs on single ranks, which then must be whole.
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    return function is F.cross_entropy or type(loss) is nn.CrossEntropyLoss


def _has_hooks(*modules: nn.Module) -> bool:
    """Return whether the script has hooks that see the outputs of a module, and expect all."""
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    return any(
        not isinstance(hook, UncopiedHook)
        and not str(getattr(hook, "__module__", "")).startswith("torch.")
        for hook in hooks
    )


def _summary(found: ModelComparison, own: Comparison, is_training: bool) -> str:
    model = (
        f"the whole model is not compared: {found.reason}"
        if found.difference is None
        else f"the whole model differs by {found.difference:.1g}"
    )
    text = (
        f"tensor axis ({'training' if is_training else 'evaluation'}): {own.operations} operations "
        f"compared with the whole ones, largest difference {own.largest:.1g}; {model}; "
        f"{found.seconds:.2f} s"
    )
    places = sorted(own.gathered.items(), key=lambda entry: -entry[1])
    lines = [f"  {place} needs whole tensors: {count:,} bytes" for place, count in places[:3]]
    if len(places) > 3:
        lines.append(f"  and {len(places) - 3} more such operations")
    if places:
        lines.append("  the rule 'replicate' for the layers that give these tensors avoids that")
    return "\n".join([text, *lines])
