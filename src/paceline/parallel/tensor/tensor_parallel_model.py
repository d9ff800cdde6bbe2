"""A model whose layers are divided over the tensor axis, as the training loop sees it."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ...record.hooks.phases import UncopiedHook
from ..comparison.model_comparison import Division, ModelComparison, compare_model
from ..divided.divided_tensor import whole_outputs
from ..memory_budget import GIB, available_bytes
from ..mesh import TENSOR, Mesh
from ..replicated.replica import has_tensor, own_methods
from ..strategy.distributed_model import DistributedModel, Part
from ..strategy.parallel_strategy import DistributionRequest
from ..strategy.training_step import TrainingStep
from .comparison import Comparison, axis_device_of
from .parameters import Views
from .split_tensor import SplitTensor, Watch, watching
from .splits import Split

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
        self.device = axis_device_of(self.axis)
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
        if not any(float(one) for one in self.pieces(flag)):
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
    places = sorted(own.gathered.items(), key=lambda one: -one[1])
    lines = [f"  {place} needs whole tensors: {count:,} bytes" for place, count in places[:3]]
    if len(places) > 3:
        lines.append(f"  and {len(places) - 3} more such operations")
    if places:
        lines.append("  the rule 'replicate' for the layers that give these tensors avoids that")
    return "\n".join([text, *lines])
