"""Recomputation: blocks keep their inputs, and compute their activations again in backward.

Stands on non-reentrant ``torch.utils.checkpoint``, which replays random states and autocast, and
takes keyword arguments and several outputs. It runs a forward twice, so a buffer that forward
changes (batch norm's running statistics, spectral norm's vectors) would change twice:
``ReplayedBuffers`` gives the second forward the buffers of the first, and restores them.
"""

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...record.hooks.phases import UncopiedHook
from ..blocks import names_in, recomputed_blocks
from .host_activations import activations_on_host
from .plan import Plan
from .replay import ReplayedBuffers, is_product, works_in_place

WAYS = ("blocks", "selective", "auto")


def recompute_blocks(
    model: nn.Module,
    recompute: str | None,
    memory_budget: float | None,
    names: Sequence[str] | None,
    say_once: Callable[[str], None],
    held_gib: float = 0.0,
    is_part: bool = False,
) -> None:
    """Let the blocks of ``model`` recompute their activations, as ``world.distribute`` describes.

    Args:
        held_gib: The part of the budget that is not for activations.
        is_part: Whether other ranks have the rest of the model, and perhaps blocks that this rank
            has not.

    Raises:
        ValueError: An unknown ``recompute``, a budget without "auto", a block name that matches
            nothing, or a model that caches keys and values.
    """
    _check_options(model, recompute, memory_budget)
    if recompute is None:
        return
    if is_part:
        blocks = recomputed_blocks(model, names_in(model, names))
    else:
        blocks = blocks_to_recompute(model, recompute, names, say_once)
    if not blocks:
        return
    plan = Plan(memory_budget, held_gib, say_once) if recompute == "auto" else None
    for _, module in blocks:
        module.forward = _Recomputed(module, recompute, plan)
    if plan is not None:
        model.register_forward_hook(UncopiedHook(plan.decide))


def blocks_to_recompute(
    model: nn.Module,
    recompute: str,
    names: Sequence[str] | None,
    say_once: Callable[[str], None],
) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a whole model, and say it if there are none.

    Raises:
        ValueError: A name matches no module.
    """
    blocks = recomputed_blocks(model, names)
    if not blocks:
        say_once(
            f"recompute={recompute!r} has no effect: the {type(model).__name__} has no repeated "
            "blocks. HINT: name them: world.distribute(model, optimizer, recomputed_blocks=[...])"
        )
    return blocks


def _check_options(model: nn.Module, recompute: str | None, memory_budget: float | None) -> None:
    reason = None
    if recompute is not None and recompute not in WAYS:
        reason = f"recompute must be 'blocks', 'selective' or 'auto'; this is {recompute!r}"
        reason += ". HINT: recompute='blocks'"
    elif recompute != "auto" and memory_budget is not None:
        reason = f"memory_budget has no effect with recompute={recompute!r}. "
        reason += "HINT: recompute='auto', or layout='auto'"
    elif memory_budget is not None and not 0 < memory_budget < float("inf"):
        reason = f"memory_budget must be above 0 GiB; this is {memory_budget}. "
        reason += "HINT: memory_budget=4.0"
    elif recompute and getattr(getattr(model, "config", None), "use_cache", False):
        reason = "a model that caches keys and values would cache them twice with recompute. "
        reason += "HINT: model.config.use_cache = False"
    if reason:
        raise ValueError(f"world.distribute: {reason}")


class _Recomputed:
    """The ``forward`` of a block that recomputes. A pickled model has the plain one."""

    def __init__(self, module: nn.Module, way: str, plan: "Plan | None") -> None:
        self.module, self.forward, self.plan = module, module.forward, plan
        self.way = "blocks" if plan is not None else way

    def __reduce__(self) -> Any:
        return operator.getitem, ((self.forward,), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recomputed":
        copied = _Recomputed.__new__(_Recomputed)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **options)
        if self.plan is not None and not self.plan.is_decided:
            self.plan.measure(self, args, options)
        if self.way == "keep":
            return self.forward(*args, **options)
        if self.way == "host":
            with activations_on_host(self.module):
                return self.forward(*args, **options)
        # options in a partial: checkpoint has options of its own, whose names may be the same
        forward = functools.partial(self.forward, **options)
        replayed = ReplayedBuffers(self.module)
        is_selective = self.way == "selective" and not works_in_place(self.module)
        contexts = functools.partial(_contexts, replayed, is_selective)
        output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)
        replayed.forget_unchanged()
        return output


def _contexts(replayed: "ReplayedBuffers", is_selective: bool) -> tuple[Any, Any]:
    first: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not is_selective:
        return first, replayed.second_forward()
    first, second = create_selective_checkpoint_contexts(_keep_products)
    return first, _both(replayed, second)


@contextlib.contextmanager
def _both(replayed: "ReplayedBuffers", second: Any) -> Iterator[None]:
    # buffers outside: the mode must not count their copies as operators of the forward
    with replayed.second_forward(), second:
        yield


def _keep_products(_: Any, called: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    if is_product(called, args, options):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
