"""Optimizers and learning rates for large batches.

LARS and LAMB scale a layer's update to the norm of its parameters. The norm is that of the whole
tensor, in all layouts: where ranks hold parts of it, one small all-reduce adds their squares.

Where the papers leave a choice, these do the same as timm: a layer whose norm, or whose update's
norm, is 0 is not scaled, and norms are not clipped. Layers without weight decay are scaled, too,
for which timm needs ``always_adapt=True``.

Rules of the learning rate: linear, lr x k, and square root, lr x sqrt(k), where k = global batch /
reference batch. Linear with warm-up is Goyal et al., arXiv 1706.02677, section 2.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler

from ..record.hooks.script_options import FIRST_RATE
from .whole_norms import local_part, whole_norms

RULES = {"linear": float, "sqrt": math.sqrt}
# Factor of the learning rate at step t of n, with a warm-up of w steps.
DECAYS: dict[str, Callable[[int, int, int], float]] = {
    "linear": lambda t, n, w: 1 - (t - w) / (n - w),
    "polynomial": lambda t, n, w: (1 - (t - w) / (n - w)) ** 2,  # LARS's paper, section 5
    "sqrt": lambda t, n, w: math.sqrt(max(w, 1) / max(t, 1)),  # arXiv 1706.03762, section 5.3
}


class LayerwiseOptimizer(Optimizer):
    """An optimizer that scales the update of each layer.

    Tensors of one dim (biases, weights of norms) are neither scaled nor decayed, as in the papers'
    experiments, unless their parameter group has ``"adapt": True``; with ``False`` none is.
    """

    _has_stepped = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "adapt": None})
        self._check_layers()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Raises:
            ValueError: An option is out of range.
        """
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_options(self, options: dict[str, Any]) -> None:
        names = [name for name in self.defaults if name not in ("betas", "adapt")]
        numbers = {name: options[name] for name in names}
        if "betas" in self.defaults:
            betas = options["betas"]
            if not isinstance(betas, tuple | list) or len(betas) != 2:
                raise self._error(f"betas must be two numbers; this is {betas!r}")
            numbers |= {f"betas[{i}]": beta for i, beta in enumerate(betas)}
        for name, value in numbers.items():
            is_factor = name == "momentum" or name.startswith("betas")  # of the previous update
            is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
            number = value.item() if is_scalar else value
            end = 1 if is_factor else math.inf
            if not isinstance(number, Real) or not 0 <= float(number) < end:
                limit = "below 1" if is_factor else "finite"
                raise self._error(f"{name} must be at least 0 and {limit}; this is {value!r}")
        if options["adapt"] not in (None, True, False):
            raise self._error(f"adapt must be True, False or None; this is {options['adapt']!r}")

    def _error(self, reason: str) -> ValueError:
        name = type(self).__name__
        betas = ", betas=(0.9, 0.999)" if "betas" in self.defaults else ""
        hint = f"paceline.optim.{name}(model.parameters(), lr=0.01{betas})"
        return ValueError(f"{name}: {reason}. HINT: {hint}")

    def _check_layers(self, is_new: bool = True) -> None:
        """Raise ValueError for a model whose layers a wrapper has flattened into vectors.

        is_new: Whether the optimizer is being made: later, it may hold vectors of a layout's stage.
        """
        name = type(self).__name__
        parameters = [p for group in self.param_groups for p in group["params"]]
        chosen = all(group["adapt"] is not None for group in self.param_groups)
        # of FullyShardedDataParallel: one for several layers, or its views (use_orig_params=True)
        flat = [
            p
            for p in parameters
            if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False)
        ]
        if flat or (is_new and not chosen and all(p.ndim < 2 for p in parameters)):
            vectors = f"{len(flat)} of" if flat else "all"
            raise ValueError(
                f"{name}: {vectors} {len(parameters)} parameters are vectors, so that layers "
                "cannot be distinguished: a wrapper such as FullyShardedDataParallel has flattened "
                "them, and their norm would be that of several layers. HINT: layout='zero3' of "
                "world.distribute, or fully_shard of PyTorch, which shard each parameter; for a "
                f"model that has only vectors, {name}([{{'params': ..., 'adapt': True}}])"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. All ranks that hold shards must call this.

        Args:
            closure: Computes the loss again, with its gradients.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: A gradient is sparse, or a wrapper has flattened the layers.
        """
        if not self._has_stepped:  # a wrapper may have come after the optimizer
            self._check_layers(is_new=False)
            self._has_stepped = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise ValueError(
                    f"{type(self).__name__}: a gradient is sparse, and the norm of a layer needs a "
                    "dense one. HINT: nn.Embedding(..., sparse=False)"
                )
            adapt = group["adapt"]
            chosen = [bool(p.ndim > 1 if adapt is None else adapt) for p in parameters]
            for is_scaled in (True, False):
                part = [p for p, of in zip(parameters, chosen, strict=True) if of == is_scaled]
                if part:
                    self._update(group, part, is_scaled)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], is_scaled: bool) -> None:
        raise NotImplementedError

    def _state(self, name: str, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of a state of each parameter, at first zeros."""
        for parameter in params:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local_part(self.state[parameter][name]) for parameter in params]


class LARS(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1).

    For a layer with parameters w and gradient g::

        rate = trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v = momentum * v + lr * rate * (g + weight_decay * w)
        w = w - v

    The learning rate is inside of the momentum, as in the paper; timm has it outside, which is the
    same for a constant learning rate.

    Args:
        params: Parameters or parameter groups. ``"adapt"`` of a group: see LayerwiseOptimizer.
        lr: Learning rate (gamma in the paper).
        momentum: Factor of the previous update.
        weight_decay: Factor of the parameters in the update (beta).
        trust_coefficient: Change of a layer relative to its norm at a learning rate of 1 (eta).

    Raises:
        ValueError: A number is out of range, or all parameters are flattened into vectors.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "trust_coefficient": trust_coefficient})

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], is_scaled: bool) -> None:
        own = [local_part(p) for p in params]
        updates = [local_part(p.grad) for p in params if p.grad is not None]
        lr, decay = float(group["lr"]), group["weight_decay"] if is_scaled else 0.0
        velocities = self._state("momentum_buffer", params)
        torch._foreach_mul_(velocities, group["momentum"])
        if is_scaled:
            of_w, of_g = whole_norms(own + updates, params + params).chunk(2)
            rates = _ratio(group["trust_coefficient"] * of_w, of_g + decay * of_w, of_g) * lr
            _add_scaled(velocities, updates, rates)
            if decay:
                _add_scaled(velocities, own, rates * decay)
        else:
            torch._foreach_add_(velocities, updates, alpha=lr)
        torch._foreach_sub_(own, velocities)


class LAMB(LayerwiseOptimizer):
    """Layer-wise Adam (You et al. 2020, arXiv 1904.00962, algorithm 2, with bias correction).

    For a layer with parameters w, and Adam's moments m and v of its gradient::

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    Args:
        params: Parameters or parameter groups. ``"adapt"`` of a group: see LayerwiseOptimizer.
        lr: Learning rate.
        betas: Decay of the first and of the second moment in a step.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the parameters in the update.

    Raises:
        ValueError: A number is out of range, or all parameters are flattened into vectors.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor], is_scaled: bool) -> None:
        own = [local_part(p) for p in params]
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        first, second = (self._state(name, params) for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        # r is `scale` times m / (sqrt(v) + eps'), so that fewer passes over memory are needed.
        counts = self._count(params)
        corrections = [math.sqrt(1 - beta2**count) for count in counts]
        scales = [c / (1 - beta1**count) for c, count in zip(corrections, counts, strict=True)]
        below = list(torch._foreach_sqrt(second))
        torch._foreach_add_(below, [group["eps"] * c for c in corrections])
        lr = float(group["lr"])
        if not is_scaled:
            torch._foreach_addcdiv_(own, first, below, [-lr * scale for scale in scales])
            return
        for above, root in zip(first, below, strict=True):
            torch.div(above, root, out=root)  # in place: new tensors take longer than a pass
        if group["weight_decay"]:
            decay = own[0].new_tensor([group["weight_decay"] / scale for scale in scales])
            _add_scaled(below, own, decay)
        of_w, of_r = whole_norms([*own, *below], params + params).chunk(2)
        scaled = of_r.new_tensor(scales)
        rates = _ratio(of_w, of_r * scaled, of_r) * scaled * -lr
        _add_scaled(own, below, rates)

    def _count(self, params: list[torch.Tensor]) -> list[float]:
        """Return the number of updates of each parameter, with this one."""
        for parameter in params:
            state = self.state[parameter]
            state["step"] = state.get("step", torch.zeros(())) + 1  # on the CPU, as Adam has it
        return [float(self.state[parameter]["step"]) for parameter in params]


def _ratio(above: torch.Tensor, below: torch.Tensor, of_update: torch.Tensor) -> torch.Tensor:
    """Return ``above / below``, or 1 where a norm is 0."""
    usable = (above > 0) & (of_update > 0)
    return torch.where(usable, above / torch.where(usable, below, 1.0), 1.0)


def _add_scaled(
    tensors: list[torch.Tensor], updates: list[torch.Tensor], factors: torch.Tensor
) -> None:
    """Add to each tensor its update times its factor, without waiting for a GPU."""
    first = updates[0]
    if all(u.device == first.device and u.dtype == first.dtype for u in updates):
        each = list(factors.to(first.device, first.dtype).unbind())  # one conversion for all
    else:
        each = [f.to(u.device, u.dtype) for f, u in zip(factors.unbind(), updates, strict=True)]
    torch._foreach_addcmul_(tensors, updates, each)


@dataclass
class WarmupAndDecay:
    """Factor of the learning rate at a step: a linear rise, then a decay.

    An object and not a function, so that the scheduler's state has its numbers.

    Attributes:
        start: Factor at step 0.
        warmup: Steps from ``start`` to 1.
        steps: Steps of the whole training.
        decay: A name of ``DECAYS``.
    """

    start: float
    warmup: int
    steps: int
    decay: str

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start + (1 - self.start) * step / self.warmup
        return DECAYS[self.decay](min(step, self.steps), self.steps, self.warmup)


def scale_learning_rate(
    optimizer: Optimizer,
    *,
    global_batch: int,
    reference_batch: int,
    rule: str = "linear",
    warmup: int = 0,
    decay: str | None = None,
    steps: int | None = None,
) -> LRScheduler | None:
    """Multiply every parameter group's learning rate by the rule's factor.

    With ``warmup`` steps, return a PyTorch scheduler that starts at the original rate and reaches
    the scaled one after that many steps (step it once per optimizer step). With ``decay``, the rate
    falls afterwards: "linear" or "polynomial" (of power 2) to 0 after ``steps`` steps, or "sqrt",
    with the root of the number of steps.

    Raises ValueError for an unknown rule or decay, a batch below one, a negative warm-up, a number
    that is not whole, or a decay without a number of steps that exceeds the warm-up.
    """
    _check_scaling(rule, global_batch, reference_batch, warmup, decay, steps)
    factor = RULES[rule](global_batch / reference_batch)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        for name in ("initial_lr", FIRST_RATE):
            if name in group:
                group[name] = group[name] * factor
    if decay is not None and steps is not None:
        start = 1 / factor if factor > 1 else 1.0
        return LambdaLR(optimizer, WarmupAndDecay(start, warmup, steps, decay))
    if not warmup or factor <= 1:
        return None
    return LinearLR(optimizer, start_factor=1 / factor, total_iters=warmup)


def _check_scaling(
    rule: str,
    global_batch: int,
    reference_batch: int,
    warmup: int,
    decay: str | None,
    steps: int | None,
) -> None:
    """Raise ValueError for arguments of ``scale_learning_rate`` that do not fit each other."""
    if rule not in RULES:
        raise ValueError(
            f"world.scale_learning_rate: rule must be one of {', '.join(map(repr, RULES))}; this "
            f"is {rule!r}. HINT: rule='linear'"
        )
    counts = {"global_batch": global_batch, "reference_batch": reference_batch, "warmup": warmup}
    for name, value in (counts | ({} if steps is None else {"steps": steps})).items():
        try:
            operator.index(value)
        except TypeError:
            raise ValueError(
                f"world.scale_learning_rate: {name} must be an int; this is {value!r}. HINT: "
                f"{name}=int(...), or {name}=256"
            ) from None
    if reference_batch < 1 or global_batch < 1:
        raise ValueError(
            "world.scale_learning_rate: reference_batch and global_batch must be at least 1; these "
            f"are reference_batch={reference_batch}, global_batch={global_batch}. HINT: "
            "reference_batch is the batch size for which the learning rate was tuned"
        )
    if warmup < 0:
        raise ValueError(
            f"world.scale_learning_rate: warmup must be at least 0; this is {warmup}. HINT: "
            "warmup=500 optimizer steps, or 0 for none"
        )
    if decay is not None and (decay not in DECAYS or steps is None or steps <= warmup):
        raise ValueError(
            f"world.scale_learning_rate: decay must be one of {', '.join(map(repr, DECAYS))}, with "
            f"more steps than warmup={warmup}; these are decay={decay!r}, steps={steps}. HINT: "
            "decay='polynomial', steps=epochs * len(loader)"
        )
