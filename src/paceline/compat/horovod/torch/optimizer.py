"""``DistributedOptimizer``: an optimizer whose step uses the gradients of all ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from .compression import Compression
from .gradient_exchange import STATE, ExchangeOptions, GradientExchange, check_passes, state_of
from .mpi_ops import (
    Adasum,
    Average,
    allreduce,
    allreduce_async_,
    global_process_set,
    size,
    synchronize,
)
from .named_parameters import check_groups, check_names, groups_of, parameters_of


class DeltaExchange:
    """The step of an optimizer with ``op=Adasum``.

    Each rank steps with its own gradients; the differences to the parameters before are combined.
    So Adasum sees updates that contain the learning rate and the momentum.
    """

    def __init__(
        self, optimizer: Optimizer, names: dict[torch.Tensor, str], compression: Any
    ) -> None:
        self._optimizer, self._names, self._compression = optimizer, names, compression

    @torch.no_grad()
    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Step on this rank, and replace the update by the Adasum of all ranks' updates."""
        trained = [one for one in parameters_of(self._optimizer) if one.requires_grad]
        starts = [one.detach().clone() for one in trained]
        loss = own_step(closure)
        sent = []
        for number, (parameter, start) in enumerate(zip(trained, starts, strict=True)):
            name = self._names.get(parameter, f"allreduce.noname.{number}")
            tensor, context = self._compression.compress(parameter.detach() - start)
            sent.append((allreduce_async_(tensor, op=Adasum, name=f"delta.{name}"), context))
        for parameter, start, (handle, context) in zip(trained, starts, sent, strict=True):
            update = self._compression.decompress(synchronize(handle), context)
            parameter.copy_(start.add_(update))
        return loss


class _StepState:
    """What the methods of a distributed optimizer know about the current step.

    Attributes:
        synchronized: Whether ``synchronize`` was called since the last step.
        should_synchronize: Whether ``step`` has to call it.
    """

    def __init__(self, exchange: GradientExchange, delta: DeltaExchange | None) -> None:
        self.exchange, self.delta = exchange, delta
        self.synchronized, self.should_synchronize = False, True


class DistributedMethods:
    """The methods that an optimizer gets, in front of those of its own class."""

    # GradScaler then unscales gradients itself, after the exchange.
    _step_supports_amp_scaling = property(lambda self: False, lambda self, value: None)

    @property
    def backward_passes_per_step(self) -> int:
        return _state(self).exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set after how many backward passes the gradients are exchanged."""
        check_passes(passes)
        _state(self).exchange.set_passes(passes)

    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are reduced.

        For code that reads or changes gradients before the step, such as clipping.
        """
        state = _state(self)
        if state.delta is None:
            state.exchange.synchronize()
            state.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step`` use the gradients as they are, after ``synchronize``."""
        state = _state(self)
        if state.delta is not None:
            raise AssertionError("Skipping synchronization is not supported when using Adasum")
        state.should_synchronize = False
        try:
            yield
        finally:
            state.should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of all ranks.

        Args:
            closure: Computes the loss again, and its gradients. ``step`` returns the average of the
                ranks' losses, as one process with all samples would.
        """
        optimizer, state = cast(Any, self), _state(self)
        optimizer._opt_called = True  # for learning-rate schedulers
        own_step = super().step  # type: ignore[misc]
        if state.delta is not None:
            return state.delta.step(own_step, closure)
        if not state.should_synchronize:
            state.synchronized = False
            return own_step(closure)
        if state.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to "
                "consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        if closure is None or state.exchange.has_gradients:
            state.exchange.synchronize()
        state.synchronized = False
        return own_step(_exchanged(closure, state.exchange) if closure is not None else None)

    # torch would run the optimizer's step hooks once more around this function.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **options: Any) -> None:
        if _state(self).exchange.has_gradients:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause a "
                "race condition. HINT: call it before loss.backward(), or accumulate with "
                "backward_passes_per_step"
            )
        super().zero_grad(*args, **options)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        state = _state(self)
        state.exchange.forget()
        state.synchronized, state.should_synchronize = False, True
        super().load_state_dict(*args, **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        exchange = _state(self).exchange
        if exchange.is_active:
            exchange.watch_parameters()


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return an optimizer whose step uses the gradients of all ranks.

    It has the class of ``optimizer`` among its bases, and shares its state, parameter groups and
    hooks with it. The exchange of a gradient begins when the backward pass has computed it.

    Args:
        optimizer: The optimizer of this rank.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``. Names
            must be equal on all ranks.
        compression: How gradients are sent.
        backward_passes_per_step: Backward passes whose gradients are accumulated before they are
            exchanged.
        op: How gradients are combined: Average, Sum, or Adasum, which combines the updates of the
            ranks' own steps.
        gradient_predivide_factor: With Average: divide by this factor before the sum, and by the
            rest after it.
        num_groups: Former name of ``groups``.
        groups: Number of groups of gradients that are exchanged together, or lists of parameters.
        sparse_as_dense: Exchange sparse gradients as dense ones.
        process_set: Ranks whose gradients are combined; other ranks step on their own.

    Raises:
        ValueError: An argument is invalid.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"DistributedOptimizer wraps an optimizer of torch, not a {type(optimizer).__name__}. "
            "HINT: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    check_passes(backward_passes_per_step)
    groups = groups_of(num_groups, groups, level=3)
    names = check_names(optimizer, named_parameters)
    options = ExchangeOptions(
        compression, op, gradient_predivide_factor, check_groups(groups), sparse_as_dense,
        process_set,
    )  # fmt: skip
    uses_deltas = size() > 1 and op == Adasum
    if uses_deltas and process_set is not global_process_set:
        raise NotImplementedError(
            "Adasum does not support non-global process sets. HINT: op=hvd.Average"
        )
    _unwrap(optimizer)
    exchange = GradientExchange(
        optimizer, names, backward_passes_per_step, options, not uses_deltas
    )
    delta = DeltaExchange(optimizer, names, compression) if uses_deltas else None
    return _wrapped(optimizer, _StepState(exchange, delta))


def _wrapped(optimizer: Optimizer, state: _StepState) -> Any:
    """Return an object of a class with the distributed methods, and the attributes of
    ``optimizer``.
    """
    own = type(optimizer)
    if not issubclass(own, DistributedMethods):
        own = type(own.__name__, (DistributedMethods, own), {"__module__": own.__module__})
    made: Any = object.__new__(own)
    # One dictionary for both: a learning-rate scheduler may hold the given optimizer, and
    # load_state_dict replaces attributes.
    made.__dict__ = optimizer.__dict__
    setattr(made, STATE, state)
    if "step" in made.__dict__:  # a scheduler has put a function there, of the given optimizer
        made.step = MethodType(own.step, made)
    return made


def _unwrap(optimizer: Optimizer) -> None:
    """Remove the hooks of an earlier DistributedOptimizer of the same optimizer."""
    state = optimizer.__dict__.pop(STATE, None)
    if state is not None:
        state.exchange.close()


def _state(optimizer: Any) -> _StepState:
    return state_of(optimizer, _StepState)


def _exchanged(closure: Callable[[], Any], exchange: GradientExchange) -> Callable[[], Any]:
    """Return the closure, followed by the exchange of gradients and loss."""

    def run() -> Any:
        with torch.enable_grad():
            loss = closure()
        exchange.synchronize()
        if loss is None or not exchange.is_active:
            return loss
        process_set = exchange.options.process_set
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        mean = allreduce(value, op=Average, name="optimizer.closure", process_set=process_set)
        return mean if isinstance(loss, torch.Tensor) else float(mean)

    return run
