"""Averaging of gradients while the backward pass computes them.

A hook on each parameter submits its gradient as soon as it is accumulated, so that the exchange
overlaps with the rest of the backward pass. ``synchronize`` waits for the results. Ranks agree on a
gradient by its name, so they may submit in different orders.
"""

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ....record.hooks.phases import UncopiedHook
from .functions import broadcast_object
from .mpi_ops import (
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from .named_parameters import parameters_of, split_evenly


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

    @property
    def scales(self) -> dict[str, float]:
        """The factors before and after the sum."""
        if self.op != Average or self.predivide_factor == 1.0:
            return {}
        return {
            "prescale_factor": 1.0 / self.predivide_factor,
            "postscale_factor": self.predivide_factor,
        }


@dataclass
class _Sent:
    """Gradients that were submitted together, and are not yet taken back.

    Attributes:
        handle: Of the asynchronous collective.
        grads: The gradients; ``versions``: how often each had been changed.
        contexts: What decompression needs.
    """

    parameters: list[torch.Tensor]
    handle: Any
    grads: list[torch.Tensor]
    contexts: list[Any]
    versions: list[int] = field(default_factory=list)


class GradientExchange:
    """The gradients of one optimizer, from the backward pass to the step.

    Attributes:
        is_active: Whether this rank exchanges gradients with others.
        passes: Backward passes before a gradient is submitted.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[torch.Tensor, str],
        passes: int,
        options: ExchangeOptions,
        is_enabled: bool = True,
    ) -> None:
        self.optimizer, self.names, self.options = optimizer, names, options
        self.passes = passes
        process_set = options.process_set
        self.is_active = is_enabled and bool(process_set.included()) and process_set.size() > 1
        self._hooks: dict[torch.Tensor, Any] = {}
        self._passes_left: dict[torch.Tensor, int] = {}
        self._touched: set[torch.Tensor] = set()  # with a gradient since the last synchronize
        self._sent: list[_Sent] = []
        self._was_sparse: set[torch.Tensor] = set()
        self._groups: list[list[torch.Tensor]] = []
        self._group_of: dict[torch.Tensor, int] = {}
        self._ready: dict[int, int] = {}  # parameters of each group whose gradients are complete
        if self.is_active:
            self._make_groups()
            self.watch_parameters()

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass has run since the last ``synchronize``."""
        return bool(self._touched)

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.forget()

    def forget(self) -> None:
        """Drop what was submitted and not taken back; the next backward pass is the first."""
        for sent in self._sent:
            with contextlib.suppress(RuntimeError):  # of an exchange that has failed
                synchronize(sent.handle)
        self._sent, self._touched, self._ready = [], set(), {}
        self._passes_left = dict.fromkeys(self._passes_left, self.passes)

    def close(self) -> None:
        """Remove the hooks."""
        self.forget()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self.is_active = {}, False

    def watch_parameters(self) -> None:
        """Put hooks on parameters that have none: new ones, and those that were frozen before."""
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter in self._hooks or not parameter.requires_grad:
                    continue
                self.names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                self._passes_left[parameter] = self.passes
                hook = UncopiedHook(partial(self._on_gradient, parameter))
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

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
            for sent, found in [(sent, synchronize(sent.handle)) for sent in self._sent]:
                self._take_back(sent, found)
            self._sent = []
        finally:
            self.forget()

    def _make_groups(self) -> None:
        groups = self.options.groups
        if isinstance(groups, int):
            trained = [one for one in parameters_of(self.optimizer) if one.requires_grad]
            if not groups or not trained:
                return
            # The order of rank 0 holds for all ranks, so that groups are the same.
            by_name = {self.names[one]: one for one in trained}
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
        members = set(parameters_of(self.optimizer))
        self._groups = [
            [one for one in group if one in members and one.requires_grad] for group in groups
        ]
        self._group_of = {one: i for i, group in enumerate(self._groups) for one in group}

    def _on_gradient(self, parameter: torch.Tensor, *_: Any) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step ({self.passes}) times "
                f"before call to step(), the first of parameter {self.names[parameter]}. HINT: "
                "increase backward_passes_per_step to accumulate gradients locally"
            )
        self._passes_left[parameter] -= 1
        self._touched.add(parameter)
        if self._passes_left[parameter]:
            return
        group = self._group_of.get(parameter)
        if group is None:
            self._submit([parameter])
            return
        self._ready[group] = self._ready.get(group, 0) + 1
        if self._ready[group] == len(self._groups[group]):
            self._submit(self._groups[group], group)

    def _submit_rest(self) -> None:
        """Submit the gradients of parameters whose hooks have not run often enough."""
        done = {id(one) for sent in self._sent for one in sent.parameters}
        rest = [one for one in self._hooks if one.requires_grad and id(one) not in done]
        groups: dict[int, list[torch.Tensor]] = {}
        for parameter in rest:
            if parameter.grad is None:
                parameter.grad = self._no_gradient(parameter)
            group = self._group_of.get(parameter)
            if group is None:
                self._submit([parameter])
            else:
                groups.setdefault(group, []).append(parameter)
        for group, parameters in groups.items():
            self._submit(parameters, group)

    def _no_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._was_sparse:
            return torch.zeros_like(parameter, requires_grad=False)
        data = parameter.detach()
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=data.device),
            data.new_empty((0, *data.shape[1:])),
            data.shape,
            check_invariants=True,
        )

    def _submit(self, parameters: list[torch.Tensor], group: int | None = None) -> None:
        dense = []
        for parameter in parameters:
            if self._grad(parameter).layout is torch.strided:
                dense.append(parameter)
            else:
                self._submit_sparse(parameter)
        if not dense:
            return
        options, grads = self.options, [self._grad(one) for one in dense]
        # .data has a version counter of its own, so that changes by the script can be told apart.
        pairs = [options.compression.compress(_packed(grad.data)) for grad in grads]
        tensors = [tensor for tensor, _ in pairs]
        shared: dict[str, Any] = {
            "op": options.op, "process_set": options.process_set, **options.scales,
        }  # fmt: skip
        if group is None:
            handle = allreduce_async_(tensors[0], name=self.names[dense[0]], **shared)
        else:
            handle = grouped_allreduce_async_(tensors, name=f"gradients.group.{group}", **shared)
        contexts, versions = [context for _, context in pairs], [grad._version for grad in grads]
        self._sent.append(_Sent(dense, handle, grads, contexts, versions))

    def _grad(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter, made dense if that is asked for."""
        grad = parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided and self.options.sparse_as_dense:
            grad = parameter.grad = grad.to_dense()
        return grad

    def _submit_sparse(self, parameter: torch.Tensor) -> None:
        grad = self._grad(parameter)
        self._was_sparse.add(parameter)
        options = self.options
        handle = sparse_allreduce_async(
            grad, name=self.names[parameter], op=options.op, process_set=options.process_set
        )
        self._sent.append(_Sent([parameter], handle, [grad], [None]))

    def _take_back(self, sent: _Sent, found: Any) -> None:
        if not sent.versions:
            sent.parameters[0].grad = found
            return
        outputs = found if isinstance(found, list | tuple) else [found]
        for parameter, grad, version, output, context in zip(
            sent.parameters, sent.grads, sent.versions, outputs, sent.contexts, strict=True
        ):
            if parameter.grad is not grad or grad._version != version:
                raise RuntimeError(
                    f"the gradient of {self.names[parameter]} was changed between backward() and "
                    "step(), while it was exchanged. HINT: call optimizer.synchronize() before "
                    "clip_grad_norm_ or scaler.unscale_, and step in 'with "
                    "optimizer.skip_synchronize():'; call optimizer.zero_grad() before backward()"
                )
            result = self.options.compression.decompress(output, context)
            if result.data_ptr() != grad.data_ptr() or result.dtype != grad.dtype:
                grad.data.copy_(result)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one piece of memory: itself, or a copy."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=layout):
            return tensor
    return tensor.contiguous()
