"""Learning-rate rules for larger global batches, with gradual warm-up.

linear: lr x k, square root: lr x sqrt(k), where k = global batch / reference batch. Linear
with warm-up is Goyal et al., arXiv 1706.02677, section 2.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

RULES = {"linear": float, "sqrt": math.sqrt}


def scale_learning_rate(
    optimizer: Optimizer,
    *,
    global_batch: int,
    reference_batch: int,
    rule: str = "linear",
    warmup: int = 0,
) -> LinearLR | None:
    """Multiply every parameter group's learning rate by the rule's factor.

    With ``warmup`` steps, return a PyTorch scheduler that starts at the original rate and reaches
    the scaled one after that many steps (step it once per optimizer step).

    Raises ValueError for an unknown rule, a batch below one, or a negative warm-up.
    """
    if rule not in RULES:
        raise ValueError(f"learning-rate rule {rule!r} is not known. HINT: one of {list(RULES)}")
    if reference_batch < 1 or global_batch < 1:
        raise ValueError(
            f"batches must be at least 1: reference_batch={reference_batch}, "
            f"global_batch={global_batch}. HINT: reference_batch is the batch that the learning "
            "rate was tuned with"
        )
    if warmup < 0:
        raise ValueError(f"warmup={warmup} is negative. HINT: optimizer steps, 0 for none")
    factor = RULES[rule](global_batch / reference_batch)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
    if not warmup or factor <= 1:
        return None
    return LinearLR(optimizer, start_factor=1 / factor, total_iters=warmup)
