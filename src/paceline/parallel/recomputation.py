"""Recomputation: blocks keep their inputs, and compute their activations again in backward.

Stands on non-reentrant ``torch.utils.checkpoint``, which replays random states and autocast, and
takes keyword arguments and several outputs. It runs a forward twice, so a buffer that forward
changes (batch norm's running statistics, spectral norm's vectors) would change twice:
``_ReplayedBuffers`` gives the second forward the buffers of the first, and restores them.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..plurals import counted
from .blocks import find_blocks
from .memory_budget import activation_bytes
from .recompute_choice import Way, choose_ways, least_bytes

WAYS = ("blocks", "selective", "auto")
GIB = 1 << 30

_PRODUCTS = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
}


def recompute_blocks(
    model: nn.Module,
    recompute: str | None,
    memory_budget: float | None,
    names: Sequence[str] | None,
    say_once: Callable[[str], None],
    held_gib: float = 0.0,
) -> None:
    """Let the blocks of ``model`` recompute their activations, as ``world.distribute`` describes.

    Args:
        held_gib: The part of the budget that is not for activations.

    Raises:
        ValueError: An unknown ``recompute``, a budget without "auto", a block name that matches
            nothing, or a model that caches keys and values.
    """
    _check_options(model, recompute, memory_budget)
    if recompute is None:
        return
    blocks = find_blocks(model, names, by_size=False)
    if not blocks:
        say_once(
            f"recompute={recompute!r} has no effect: the {type(model).__name__} has no repeated "
            "blocks. HINT: name them: world.distribute(model, optimizer, recomputed_blocks=[...])"
        )
        return
    plan = _Plan(memory_budget, held_gib, say_once) if recompute == "auto" else None
    for _, module in blocks:
        module.forward = _Recomputed(module, recompute, plan)
    if plan is not None:
        model.register_forward_hook(plan.decide)


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
    """The ``forward`` of a block that recomputes."""

    def __init__(self, module: nn.Module, way: str, plan: "_Plan | None") -> None:
        self.module, self.forward, self.plan = module, module.forward, plan
        self.way = "blocks" if plan is not None else way

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **options)
        if self.plan is not None and not self.plan.is_decided:
            self.plan.measure(self, args, options)
        if self.way == "keep":
            return self.forward(*args, **options)
        # options in a partial: checkpoint has options of its own, whose names may be the same
        forward = functools.partial(self.forward, **options)
        replayed = _ReplayedBuffers(self.module)
        is_selective = self.way == "selective" and not _works_in_place(self.module)
        contexts = functools.partial(_contexts, replayed, is_selective)
        output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)
        replayed.forget_unchanged()
        return output


def _works_in_place(module: nn.Module) -> bool:
    """Return whether a module may change a kept product (``nn.ReLU(inplace=True)``)."""
    return any(getattr(part, "inplace", False) for part in module.modules())


def _contexts(replayed: "_ReplayedBuffers", is_selective: bool) -> tuple[Any, Any]:
    first: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not is_selective:
        return first, replayed.second_forward()
    first, second = create_selective_checkpoint_contexts(_keep_products)
    return first, _both(replayed, second)


@contextlib.contextmanager
def _both(replayed: "_ReplayedBuffers", second: Any) -> Iterator[None]:
    # buffers outside: the mode must not count their copies as operators of the forward
    with replayed.second_forward(), second:
        yield


def _keep_products(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    if _is_product(operator, args, options):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_product(operator: Any, args: Any, options: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name not in _PRODUCTS:
        return False
    # An attention with dropout draws random numbers: without it, later ones would differ.
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return not ({**named, **options}.get("dropout_p") or 0.0)


class _ReplayedBuffers:
    """The buffers of a block before its forward, for the forward in backward."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (buffer, buffer.detach().clone()) for buffer in module.buffers() if module.training
        ]

    def forget_unchanged(self) -> None:
        self._before = [(b, before) for b, before in self._before if not torch.equal(b, before)]

    @contextlib.contextmanager
    def second_forward(self) -> Iterator[None]:
        now = [(buffer, buffer.detach().clone()) for buffer, _ in self._before]
        _set_values(self._before)
        try:
            yield
        finally:
            _set_values(now)


def _set_values(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        # Backward may have saved the buffer, and checks that its version is the same.
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
            buffer.copy_(value)


class _Plan:
    """How each block runs under "auto": measured in the first forward with gradients.

    Without a budget in GiB it is what the first forward leaves of the rank's memory.
    """

    def __init__(
        self, memory_budget: float | None, held_gib: float, say_once: Callable[[str], None]
    ) -> None:
        self._held_gib, self._say_once = held_gib, say_once
        self._budget: int | None = None  # of activations
        if memory_budget is not None:
            self._budget = int((memory_budget - held_gib) * GIB)
        self._measured: dict[_Recomputed, list[Way]] = {}
        self.is_decided = False

    def measure(self, block: _Recomputed, args: Any, options: Any) -> None:
        """Add a call of a block to the measurements. It runs once more, and keeps nothing."""
        found = _measure(block, args, options)
        before = self._measured.get(block, found[:0])
        self._measured[block] = [
            Way(a.name, a.kept + b.kept, max(a.again, b.again), a.cost + b.cost)
            for a, b in zip(before, found, strict=False)
        ] or found

    def decide(self, model: nn.Module, _: Any, output: Any) -> None:
        """Choose the ways of the blocks at the end of the first forward of the model."""
        if self.is_decided or not self._measured:
            return
        ways = list(self._measured.values())
        budget, source = self._budget, ""
        if budget is None:
            budget = activation_bytes(model, _device_of(output))
            source = f"; {budget / GIB:.4g} GiB of the rank's memory are available for them"
            budget = max(budget, least_bytes(ways))
        choice = choose_ways(ways, budget)
        if choice is None:
            least, held = least_bytes(ways) / GIB, self._held_gib
            beside = (
                f", beside {held:.4g} GiB of parameters, gradients and optimizer states"
                if held
                else ""
            )
            raise ValueError(
                f"world.distribute: memory_budget={budget / GIB + held:.4g} GiB is below "
                f"what the activations of {counted(len(ways), 'block')} take if all are "
                f"recomputed, {least:.4g} GiB{beside}. HINT: "
                f"memory_budget={(least + held) * 1.01:.4g}, or a smaller batch"
            )
        for block, name in zip(self._measured, choice.names, strict=True):
            block.way, block.plan = name, None
        self.is_decided = True
        parts = [(choice.names.count(name), name) for name in ("keep", "selective", "blocks")]
        words = {"keep": "kept", "selective": "recomputed in part", "blocks": "recomputed"}
        text = ", ".join(f"{count} {words[name]}" for count, name in parts if count)
        blocks = counted(len(ways), "block")
        self._say_once(f"recompute='auto': activations of {blocks}: {text}{source}")
        self._measured.clear()


def _device_of(output: Any) -> torch.device:
    devices = (leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return next(devices, torch.device("cpu"))


def _measure(block: _Recomputed, args: Any, options: Any) -> list[Way]:
    """Return bytes and seconds of the ways to run a block with these arguments."""
    outside = {_storage(t) for t in block.module.parameters()}
    inputs = {_storage(t): t for t in tree_leaves((args, options)) if isinstance(t, torch.Tensor)}
    # The storages are held until the end: the address of a freed one is used again.
    saved: dict[int, torch.UntypedStorage] = {}

    nothing = torch.empty(0)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in outside:
            saved[_storage(tensor)] = tensor.untyped_storage()
        return nothing

    replayed, products = _ReplayedBuffers(block.module), _Products()
    devices = sorted({t.device.index for t in inputs.values() if t.device.type == "cuda"})
    start = time.perf_counter()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.random.fork_rng(devices=devices), replayed.second_forward(), hooks, products:
        block.forward(*args, **options)
    seconds = time.perf_counter() - start
    total = sum(storage.nbytes() for storage in saved.values())
    kept = sum(t.untyped_storage().nbytes() for key, t in inputs.items() if key not in outside)
    ways = [Way("keep", total, 0, 0.0), Way("blocks", kept, total, seconds)]
    if not _works_in_place(block.module):
        rest = max(seconds - products.seconds, 0.0)
        ways.append(Way("selective", kept + products.nbytes, total, rest))
    return ways


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Products(TorchDispatchMode):
    """Bytes and seconds of the operators that selective recomputation keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.seconds = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        if _is_product(func, args, kwargs or {}):
            self.seconds += time.perf_counter() - start
            self.nbytes += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, torch.Tensor))
        return output
