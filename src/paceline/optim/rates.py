"""Learning-rate rules for larger global batches, with gradual warm-up and decay.

linear: lr x k, square root: lr x sqrt(k), where k = global batch / reference batch. Linear
with warm-up is Goyal et al., arXiv 1706.02677, section 2.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler

from ..record.hooks.script_options import FIRST_RATE

RULES = {"linear": float, "sqrt": math.sqrt}
# Factor of the learning rate at step t of n, with a warm-up of w steps.
DECAYS: dict[str, Callable[[int, int, int], float]] = {
    "linear": lambda t, n, w: 1 - (t - w) / (n - w),
    "polynomial": lambda t, n, w: (1 - (t - w) / (n - w)) ** 2,  # LARS's paper, section 5
    "sqrt": lambda t, n, w: math.sqrt(max(w, 1) / max(t, 1)),  # arXiv 1706.03762, section 5.3
}


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
