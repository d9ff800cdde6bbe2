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
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...plurals import counted
from ...record.hooks.phases import UncopiedHook
from ..blocks import names_in, recomputed_blocks
from ..memory_budget import GIB, activation_bytes, free_bytes
from .host_activations import (
    MAX_LEAVING_BYTES,
    activations_on_host,
    is_movable,
    leaving_storages,
    now,
    seconds_per_byte,
)

# What a block that runs its forward twice keeps: buffers, and outputs that cost much.


class ReplayedBuffers:
    """The buffers of a block before its forward, for the forward in backward."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (buffer, buffer.detach().clone()) for buffer in module.buffers() if module.training
        ]

    def forget_unchanged(self) -> None:
        """Free the copies of buffers that the forward has not changed.

        Those of a GPU stay: a comparison would wait for the device in each forward of each block.
        (Batch norm changes its statistics without a new version of the tensor.)
        """
        self._before = [
            (buffer, before)
            for buffer, before in self._before
            if buffer.device.type != "cpu" or not torch.equal(buffer, before)
        ]

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


# operators whose outputs selective recomputation keeps: they cost much for their bytes
PRODUCTS = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
}


def is_product(operator: Any, args: Any, options: Any) -> bool:
    """Return whether selective recomputation keeps the output of an operator."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name not in PRODUCTS:
        return False
    # An attention with dropout draws random numbers: without it, later ones would differ.
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return not ({**named, **options}.get("dropout_p") or 0.0)


def works_in_place(module: nn.Module) -> bool:
    """Return whether a module may change a kept product (``nn.ReLU(inplace=True)``)."""
    return any(getattr(part, "inplace", False) for part in module.modules())


# How each block runs under ``recompute="auto"``: measured in the first forward with gradients.

GRID_CELLS = 4096  # bytes are rounded up to this fraction of the budget


class Way(NamedTuple):
    """One way to run a block.

    Attributes:
        kept: Bytes kept from forward to backward.
        again: Bytes that are added during its backward, recomputed or copied from the host.
        cost: Seconds of recomputation, or of copies to the host and back.
    """

    name: str
    kept: int
    again: int
    cost: float


class Choice(NamedTuple):
    """The ways of all blocks, in the order of forward, and the seconds they recompute."""

    names: tuple[str, ...]
    cost: float


def peak_bytes(ways: Sequence[Way]) -> int:
    """Return the largest sum of the blocks' activations during forward and backward.

    When a block runs its backward, those after it have released their activations.
    """
    kept = peak = 0
    for way in ways:
        kept += way.kept
        peak = max(peak, kept + way.again)
    return peak


def least_bytes(blocks: Sequence[Sequence[Way]]) -> int:
    """Return the smallest peak of any choice."""
    low, high = 0, peak_bytes([ways[0] for ways in blocks])
    high = max(high, sum(max(way.kept + way.again for way in ways) for ways in blocks))
    while low < high:
        middle = (low + high) // 2
        if _fits(blocks, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(blocks: Sequence[Sequence[Way]], budget: int) -> bool:
    kept = 0
    for ways in blocks:
        fitting = [way.kept for way in ways if kept + way.kept + way.again <= budget]
        if not fitting:
            return False
        kept += min(fitting)
    return True


def choose_ways(blocks: Sequence[Sequence[Way]], budget: int) -> Choice | None:
    """Return the choice with the least recomputation whose peak is at most ``budget`` bytes.

    A dynamic programme over the blocks in the order of forward. PyTorch's own choice
    (``torch.distributed._tools.sac_ilp``) needs the package pulp.

    Returns:
        None if no choice fits.
    """
    cell = max(budget // GRID_CELLS, 1)
    # kept bytes, rounded up: the cheapest choice that keeps so many, and its bytes
    states: dict[int, tuple[float, int, tuple[str, ...]]] = {0: (0.0, 0, ())}
    for ways in blocks:
        following: dict[int, tuple[float, int, tuple[str, ...]]] = {}
        for cost, kept, names in states.values():
            for way in ways:
                total = kept + way.kept
                if total + way.again > budget:
                    continue
                entry = (cost + way.cost, total, (*names, way.name))
                key = -(-total // cell)
                if key not in following or entry < following[key]:
                    following[key] = entry
        states = _without_dominated(following)
    if not states:
        # Two choices in one cell: the cheaper one may keep some bytes too many for what follows.
        return _least_choice(blocks, budget)
    cost, _, names = min(states.values())
    return Choice(names, cost)


def _least_choice(blocks: Sequence[Sequence[Way]], budget: int) -> Choice | None:
    kept, cost, names = 0, 0.0, []
    for ways in blocks:
        fitting = [way for way in ways if kept + way.kept + way.again <= budget]
        if not fitting:
            return None
        way = min(fitting, key=lambda way: (way.kept, way.cost))
        kept, cost = kept + way.kept, cost + way.cost
        names.append(way.name)
    return Choice(tuple(names), cost)


def _without_dominated(
    states: dict[int, tuple[float, int, tuple[str, ...]]],
) -> dict[int, tuple[float, int, tuple[str, ...]]]:
    """Return the states without those that cost no less than one that keeps fewer bytes."""
    found: dict[int, tuple[float, int, tuple[str, ...]]] = {}
    cheapest = float("inf")
    for key in sorted(states):
        if states[key][0] < cheapest:
            cheapest = states[key][0]
            found[key] = states[key]
    return found


HOST_SHARE = 0.5  # of the host's free memory that activations may take
LEAVING_SHARE = 0.125  # of the budget that copies to the host may hold


class Block(Protocol):
    """A block whose way is chosen."""

    module: nn.Module
    forward: Callable[..., Any]
    way: str
    plan: "Plan | None"


_WORDS = {
    "keep": "kept",
    "host": "moved to the host's memory",
    "selective": "recomputed in part",
    "blocks": "recomputed",
}


class Plan:
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
        self._measured: dict[Block, list[Way]] = {}
        self.is_decided = False

    def measure(self, block: Block, args: Any, options: Any) -> None:
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
        ways = _within_host_memory(list(self._measured.values()))
        budget, source = self._budget, ""
        if budget is None:
            budget = activation_bytes(model, _device_of(output))
            source = f"; {budget / GIB:.4g} GiB of the rank's memory are available for them"
            budget = max(budget, least_bytes(ways))
        choice = _choose(ways, budget, _device_of(output))
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
        counts = ((choice.names.count(name), text) for name, text in _WORDS.items())
        text = ", ".join(f"{count} {words}" for count, words in counts if count)
        blocks = counted(len(ways), "block")
        self._say_once(f"recompute='auto': activations of {blocks}: {text}{source}")
        self._measured.clear()


def _choose(blocks: list[list[Way]], budget: int, device: torch.device) -> Choice | None:
    """Return the choice of ways; with "host", what is on its way there is part of the budget."""
    choice = choose_ways(blocks, budget)
    if choice is None or "host" not in choice.names:
        return choice
    leaving = leaving_storages(device)
    leaving.limit = min(MAX_LEAVING_BYTES, int(LEAVING_SHARE * budget))
    without = [[way for way in ways if way.name != "host"] for ways in blocks]
    return choose_ways(blocks, budget - leaving.limit) or choose_ways(without, budget) or choice


def _within_host_memory(blocks: list[list[Way]]) -> list[list[Way]]:
    """Return the ways of the blocks, without "host" if the host has no memory for all of them."""
    moved = sum(way.again for ways in blocks for way in ways if way.name == "host")
    if moved <= HOST_SHARE * free_bytes(torch.device("cpu")):
        return blocks
    return [[way for way in ways if way.name != "host"] for ways in blocks]


def _device_of(output: Any) -> torch.device:
    """Return the device of the tensors; a GPU if any of them is on one."""
    devices = [leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _measure(block: Block, args: Any, options: Any) -> list[Way]:
    """Return bytes and seconds of the ways to run a block with these arguments."""
    outside = {_storage(t) for t in block.module.parameters()}
    inputs = {_storage(t): t for t in tree_leaves((args, options)) if isinstance(t, torch.Tensor)}
    # The storages are held until the end: the address of a freed one is used again.
    saved: dict[int, torch.UntypedStorage] = {}
    moved: dict[int, int] = {}  # bytes of the storages that "host" moves
    nothing = torch.empty(0)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in outside:
            saved[_storage(tensor)] = tensor.untyped_storage()
            if is_movable(tensor):
                moved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return nothing

    device = _device_of((args, options))
    replayed, products = ReplayedBuffers(block.module), _Products(device)
    devices = sorted({t.device.index for t in inputs.values() if t.device.type == "cuda"})
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    if device.type != "cpu":  # libraries load kernels and choose algorithms in the first call
        with torch.random.fork_rng(devices=devices), replayed.second_forward(), torch.no_grad():
            block.forward(*args, **options)
    start = now(device)
    with torch.random.fork_rng(devices=devices), replayed.second_forward(), hooks, products:
        block.forward(*args, **options)
    seconds = now(device) - start
    total = sum(storage.nbytes() for storage in saved.values())
    kept = sum(t.untyped_storage().nbytes() for key, t in inputs.items() if key not in outside)
    ways = [Way("keep", total, 0, 0.0), Way("blocks", kept, total, seconds)]
    if not works_in_place(block.module):
        rest = max(seconds - products.seconds, 0.0)
        ways.append(Way("selective", kept + products.nbytes, total, rest))
    if moved:  # as if no copy overlapped with computing
        moved_bytes = sum(moved.values())
        seconds = moved_bytes * seconds_per_byte(device)
        ways.append(Way("host", total - moved_bytes, moved_bytes, seconds))
    return ways


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Products(TorchDispatchMode):
    """Bytes and seconds of the operators that selective recomputation keeps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.nbytes, self.seconds = device, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = is_product(func, args, kwargs or {})
        start = now(self.device) if kept else 0.0
        output = func(*args, **(kwargs or {}))
        if kept:
            self.seconds += now(self.device) - start
            self.nbytes += sum(t.nbytes for t in tree_leaves(output) if isinstance(t, torch.Tensor))
        return output


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
