"""Averaging of gradients while the backward pass computes them.

A hook on each parameter notes its gradient as soon as it is accumulated. Noted gradients are
submitted together: once they have a certain size, and at the end of the backward pass. So the
exchange overlaps with the rest of the backward pass, and many small gradients cost little.
``synchronize`` waits for the results. Ranks agree on a gradient by its name, so they may submit in
different orders.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

from ....record.hooks.phases import UncopiedHook
from ..core.requests import Kind, Operation, Request
from .functions import broadcast_object
from .mpi_ops import Average, sparse_allreduce_async
from .named_parameters import parameters_of, split_evenly
from .submission import checked, coordinator_of, is_packed, new_request, reduce_op

BATCH_BYTES = 1 << 20  # of gradients that are submitted together
STATE = "_horovod"  # attribute of optimizers and tapes: how their gradients are exchanged
T = TypeVar("T")


def state_of(optimizer: Any, kind: type[T]) -> T:
    """Return what a distributed optimizer knows; raises RuntimeError for a copy of one."""
    state = optimizer.__dict__.get(STATE)
    if not isinstance(state, kind):
        raise RuntimeError(
            "this copy of a DistributedOptimizer does not exchange gradients. HINT: call "
            "hvd.DistributedOptimizer for the copy"
        )
    return state


def check_passes(passes: Any) -> None:
    """Raise ValueError for a number of backward passes that is no positive integer."""
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes!r:.40}. HINT: 1")


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are exchanged: the arguments of DistributedOptimizer.

    Attributes:
        compression: Class with ``compress`` and ``decompress``.
        op: Average, Sum, Min, Max, Product or Adasum.
        predivide_factor: The part of the average's division that is done before the sum.
        groups: Number of groups whose gradients are reduced together, or the groups.
        sparse_as_dense: Whether sparse gradients are made dense first.
        process_set: The ranks that take part.
    """

    compression: Any
    op: Any
    predivide_factor: float
    groups: int | list[list[torch.Tensor]]
    sparse_as_dense: bool
    process_set: Any

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if not self.predivide_factor > 0:
            raise ValueError(
                f"gradient_predivide_factor must be > 0, not {self.predivide_factor}. HINT: leave "
                "it out"
            )
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"{self.process_set} is not registered. HINT: hvd.init(), then "
                f"hvd.add_process_set({self.process_set.ranks})"
            )

    @property
    def factors(self) -> tuple[float, float]:
        """The factors before and after the sum."""
        if self.op != Average or self.predivide_factor == 1.0:
            return 1.0, 1.0
        return 1.0 / self.predivide_factor, self.predivide_factor


@dataclass(eq=False)
class _HookedParameter:
    """A parameter with a hook.

    Attributes:
        passes_left: Backward passes until its gradient is submitted.
        group: Number of its group, or None.
        is_sent: Whether its gradient is submitted, and not yet taken back.
        is_sparse: Whether its gradient was sparse.
        version: How often its complete gradient had been changed.
        request: Of its last gradient, or of that of the group which begins with it; ``sent_as``:
            shapes, dtypes and devices of these tensors.
    """

    parameter: torch.Tensor
    name: str
    nbytes: int
    passes_left: int
    group: int | None
    hook: Any = None
    version: int = 0
    request: Request | None = None
    sent_as: Any = None
    is_sent: bool = False
    is_sparse: bool = False


class _SentGradient(NamedTuple):
    """A dense gradient that was submitted.

    Attributes:
        data: The gradient without its version counter.
        version: How often the gradient had been changed.
        tensor: What was sent, and is reduced in place; ``context``: what decompression needs.
    """

    hooked: _HookedParameter
    grad: torch.Tensor
    data: torch.Tensor
    version: int
    tensor: torch.Tensor
    context: Any


@dataclass(eq=False)
class _Sent:
    """Gradients that were submitted together. wait: waits for the exchange."""

    gradients: list[_SentGradient]
    wait: Callable[[], None]


@dataclass(eq=False)
class _SentSparse:
    """A sparse gradient that was submitted. wait: waits for the result, and returns it."""

    hooked: _HookedParameter
    grad: torch.Tensor
    version: int
    wait: Callable[[], torch.Tensor]


class GradientExchange:
    """The gradients of one optimizer, from the backward pass to the step.

    Attributes:
        is_active: Whether this rank exchanges gradients with others.
        passes: Backward passes before a gradient is submitted.
        has_gradients: Whether a backward pass has run since the last ``synchronize``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[torch.Tensor, str],
        passes: int,
        options: ExchangeOptions,
        is_enabled: bool = True,
    ) -> None:
        self.optimizer, self.options, self.passes = optimizer, options, passes
        process_set = options.process_set
        self.is_active = is_enabled and bool(process_set.included()) and process_set.size() > 1
        self.has_gradients = False
        self._names = names
        # By the parameter's identity: hashing a tensor takes longer.
        self._watched: dict[int, _HookedParameter] = {}
        self._sent: list[_Sent | _SentSparse] = []
        self._batch: list[_HookedParameter] = []  # with a complete gradient, outside of groups
        self._batch_bytes = 0
        self._group_of: dict[int, int] = {}
        self._group_sizes: list[int] = []
        # of each group: with a complete gradient
        self._ready: dict[int, list[_HookedParameter]] = {}
        if self.is_active:
            self._make_groups()
            self.watch_parameters()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.forget()

    def forget(self) -> None:
        """Drop what was submitted and not taken back; the next backward pass is the first."""
        for sent in self._sent:
            with contextlib.suppress(RuntimeError):  # of an exchange that has failed
                sent.wait()
        self._sent, self._ready, self.has_gradients = [], {}, False
        self._batch, self._batch_bytes = [], 0
        for hooked in self._watched.values():
            hooked.passes_left, hooked.is_sent = self.passes, False

    def close(self) -> None:
        """Remove the hooks."""
        self.forget()
        for hooked in self._watched.values():
            hooked.hook.remove()
        self._watched, self.is_active = {}, False

    def watch_parameters(self) -> None:
        """Put hooks on parameters that have none: new ones, and those that were frozen before."""
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if id(parameter) in self._watched or not parameter.requires_grad:
                    continue
                name = self._names.get(parameter, f"allreduce.noname.{i}.{j}")
                number = self._group_of.get(id(parameter))
                hooked = _HookedParameter(parameter, name, parameter.nbytes, self.passes, number)
                hook = UncopiedHook(partial(self._on_gradient, hooked))
                hooked.hook = parameter.register_post_accumulate_grad_hook(hook)
                self._watched[id(parameter)] = hooked

    def synchronize(self) -> None:
        """Submit the gradients that are not yet, and wait until all are reduced.

        A parameter without a gradient on this rank takes part with zeros, because other ranks may
        have one.

        Raises:
            RuntimeError: A gradient was changed after it was submitted.
        """
        if not self.is_active:
            return
        try:
            self.watch_parameters()
            self._submit_rest()
            received = [(sent, sent.wait()) for sent in self._sent]
            self._sent = []
            for sent, found in received:
                if isinstance(sent, _SentSparse):
                    _check_unchanged(sent.hooked, sent.grad, sent.version)
                    sent.hooked.parameter.grad = found
                else:
                    self._take_back(sent)
        finally:
            self.forget()

    def _make_groups(self) -> None:
        groups = self.options.groups
        if isinstance(groups, int):
            trained = [
                parameter for parameter in parameters_of(self.optimizer) if parameter.requires_grad
            ]
            if not groups or not trained:
                return
            # The order of rank 0 holds for all ranks, so that groups are the same.
            by_name = {self._names[parameter]: parameter for parameter in trained}
            process_set = self.options.process_set
            root = process_set.ranks[0] if process_set.ranks else 0
            order = broadcast_object(
                list(by_name), root, name="optimizer.groups", process_set=process_set
            )
            if set(order) != by_name.keys():
                raise ValueError(
                    "groups: the ranks train different parameters; only on rank "
                    f"{root} or on this rank: {', '.join(sorted(set(order) ^ by_name.keys()))}. "
                    "HINT: freeze the same parameters on every rank"
                )
            groups = split_evenly([by_name[name] for name in order], groups)
        members = {
            id(parameter) for parameter in parameters_of(self.optimizer) if parameter.requires_grad
        }
        for number, group in enumerate(groups):
            trained = [one for one in group if id(one) in members]
            self._group_of |= {id(parameter): number for parameter in trained}
            self._group_sizes.append(len(trained))

    def _on_gradient(self, hooked: _HookedParameter, parameter: torch.Tensor) -> None:
        if hooked.passes_left <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step ({self.passes}) times "
                f"before call to step(), the first of parameter {hooked.name}. HINT: increase "
                "backward_passes_per_step to accumulate gradients locally"
            )
        hooked.passes_left -= 1
        self.has_gradients = True
        if hooked.passes_left:
            return
        hooked.version = parameter.grad._version  # type: ignore[union-attr]
        if hooked.group is None:
            if not self._batch:
                Variable._execution_engine.queue_callback(self._submit_batch)
            self._batch.append(hooked)
            self._batch_bytes += hooked.nbytes
            # A gradient on a GPU is ready when the current stream is.
            if self._batch_bytes >= BATCH_BYTES or not parameter.is_cpu:
                self._submit_batch()
            return
        ready = self._ready.setdefault(hooked.group, [])
        ready.append(hooked)
        if len(ready) == self._group_sizes[hooked.group]:
            self._submit_group(ready)

    def _submit_rest(self) -> None:
        """Submit the gradients that are not: noted ones, and those of parameters whose hooks have
        not run often enough.
        """
        self._submit_batch()
        groups: dict[int, list[_HookedParameter]] = {}
        for hooked in self._watched.values():
            if hooked.is_sent or not hooked.parameter.requires_grad:
                continue
            if hooked.parameter.grad is None:
                hooked.parameter.grad = _no_gradient(hooked)
            hooked.version = hooked.parameter.grad._version
            if hooked.group is None:
                self._batch.append(hooked)
            else:
                groups.setdefault(hooked.group, []).append(hooked)
        self._submit_batch()
        for group in groups.values():
            self._submit_group(group)

    def _submit_batch(self) -> None:
        """Submit the noted gradients."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if gradients := self._compressed(batch):
            buffers, requests = [], []
            for gradient in gradients:
                hooked, tensor, request = gradient.hooked, gradient.tensor, gradient.hooked.request
                sent_as = tensor.shape, tensor.dtype, tensor.is_cpu
                if request is None or hooked.sent_as != sent_as:
                    request = self._new_request(hooked, "allreduce", hooked.name, [tensor])
                    hooked.sent_as = sent_as
                requests.append(request)
                buffers.append([tensor])
            self._send(gradients, requests, buffers)

    def _submit_group(self, group: list[_HookedParameter]) -> None:
        # In an order that is the same on all ranks, and not that of the backward pass.
        if gradients := self._compressed(sorted(group, key=lambda one: one.name)):
            first, tensors = gradients[0].hooked, [one.tensor for one in gradients]
            sent_as = [(each.shape, each.dtype, each.is_cpu) for each in tensors]
            request = first.request
            if request is None or first.sent_as != sent_as:
                name = f"group.{first.name}"
                request = self._new_request(first, "grouped_allreduce", name, tensors)
                first.sent_as = sent_as
            self._send(gradients, [request], [tensors])

    def _compressed(self, parameters: Sequence[_HookedParameter]) -> list[_SentGradient]:
        """Return the dense ones of complete gradients, to be submitted; submit the sparse ones."""
        gradients = []
        compress = self.options.compression.compress
        for hooked in parameters:
            grad: Any = hooked.parameter.grad
            if grad.layout is not torch.strided:
                grad = self._grad_of(hooked)
                if hooked.is_sparse:
                    self._submit_sparse(hooked, grad)
                    continue
            # The version counter of .data shows whether the script has changed the gradient.
            data = grad.data
            tensor, context = compress(packed(data))
            gradients.append(_SentGradient(hooked, grad, data, hooked.version, tensor, context))
        return gradients

    def _new_request(
        self, hooked: _HookedParameter, prefix: str, name: str, tensors: list[torch.Tensor]
    ) -> Request:
        """Return the request for tensors of a gradient, or of the group that begins with it."""
        checked(prefix, tensors, reduces=True)
        options = self.options
        op = reduce_op(options.op, None)
        hooked.request = new_request(
            prefix, Kind.ALLREDUCE, tensors, name, options.process_set, op, options.factors
        )
        return hooked.request

    def _send(
        self,
        gradients: list[_SentGradient],
        requests: list[Request],
        buffers: list[list[torch.Tensor]],
    ) -> None:
        coordinator, now = coordinator_of(self.options.process_set), time.monotonic_ns()
        operations = [
            Operation(request, tensors, tensors, submitted_ns=now)
            for request, tensors in zip(requests, buffers, strict=True)
        ]
        coordinator.submit(operations)
        self._sent.append(_Sent(gradients, partial(coordinator.wait, operations)))
        for gradient in gradients:
            gradient.hooked.is_sent = True

    def _submit_sparse(self, hooked: _HookedParameter, grad: torch.Tensor) -> None:
        options = self.options
        result = sparse_allreduce_async(
            grad, name=hooked.name, op=options.op, process_set=options.process_set
        )
        hooked.is_sent = True
        self._sent.append(_SentSparse(hooked, grad, hooked.version, result))

    def _grad_of(self, hooked: _HookedParameter) -> torch.Tensor:
        """Return the sparse gradient of a parameter, made dense if the options say so."""
        grad = hooked.parameter.grad
        assert grad is not None
        if self.options.sparse_as_dense:
            hooked.parameter.grad = grad = grad.to_dense()
            hooked.version = grad._version
            return grad
        hooked.is_sparse = True
        return grad

    def _take_back(self, sent: _Sent) -> None:
        decompress = self.options.compression.decompress
        for hooked, grad, data, version, tensor, context in sent.gradients:
            _check_unchanged(hooked, grad, version)
            result = decompress(tensor, context)
            if result is not data or result.data_ptr() != grad.data_ptr():
                grad.data.copy_(result)


def _check_unchanged(hooked: _HookedParameter, grad: torch.Tensor, version: int) -> None:
    """Raise RuntimeError if the script has changed a gradient since it was submitted."""
    if hooked.parameter.grad is grad and grad._version == version:
        return
    raise RuntimeError(
        f"the gradient of {hooked.name} was changed between backward() and step(), while it was "
        "exchanged. HINT: call optimizer.synchronize() before clip_grad_norm_ or "
        "scaler.unscale_, and step in 'with optimizer.skip_synchronize():'; call "
        "optimizer.zero_grad() before backward()"
    )


def _no_gradient(hooked: _HookedParameter) -> torch.Tensor:
    """Return the gradient with which a parameter takes part that has none."""
    data = hooked.parameter.detach()
    if not hooked.is_sparse:
        return torch.zeros_like(data)
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=data.device),
        data.new_empty((0, *data.shape[1:])),
        data.shape,
        check_invariants=True,
    )


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one piece of memory: itself, or a copy."""
    return tensor if is_packed(tensor) else tensor.contiguous()
