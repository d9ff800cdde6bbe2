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
        raise ValueError(
            f"world.scale_learning_rate: rule must be one of {', '.join(map(repr, RULES))}; this "
            f"is {rule!r}. HINT: rule='linear'"
        )
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
    factor = RULES[rule](global_batch / reference_batch)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor
    if not warmup or factor <= 1:
        return None
    return LinearLR(optimizer, start_factor=1 / factor, total_iters=warmup)
