"""Explain an out-of-memory error: the predicted memory, what takes it, and what would fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...cost.layout import Layout
from ...cost.layout_memory import LayoutMemory, largest_category, size_text
from ...record.hooks.phases import UncopiedHook
from ..blocks import nbytes_of
from ..memory_budget import available_bytes
from .setup import ForwardInputs, ModelSetup, copy_without_data

CPU_PHRASES = ("can't allocate memory", "not enough memory")  # of PyTorch's allocator, RuntimeError


@dataclass
class _Watched:
    setup: ModelSetup
    layout: Layout  # without options
    ranks: int
    inputs: ForwardInputs | None = None  # of its first forward with gradients, without data


_watched: list[_Watched] = []
_last: list[tuple[BaseException, str | None]] = []  # the error that was explained last


def watch_model(setup: ModelSetup, distributed: nn.Module, layout: Layout, ranks: int) -> None:
    """Note a model, and the shapes of its first inputs, for the explanation of an error.

    Args:
        setup: The model or a copy without data, which is traced after an error.
        distributed: What the script calls. Only its first forward with gradients costs time.
    """
    watched = _Watched(setup, layout.without_options, ranks)
    _watched.append(watched)

    def note(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            handle.remove()
            watched.inputs = ForwardInputs(args, options).without_data(torch.device("meta"))

    hook = UncopiedHook(note)
    handle = distributed.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def skeleton_of(setup: ModelSetup) -> ModelSetup | None:
    """Return a copy without data, to be traced after the model was sharded; None if there is none.

    FSDP changes the classes of modules, so that they can't be copied any more.
    """
    optimizers = [setup.optimizer] if setup.optimizer is not None else []
    try:
        (model,), copies = copy_without_data([setup.model], optimizers, torch.device("meta"))
    except Exception:  # of any code of the user's model; then its errors are not explained
        return None
    return replace(setup, model=model, optimizer=copies[0] if copies else None)


def forget_models() -> None:
    """Forget all models, at the end of a world."""
    _watched.clear()
    _last.clear()


def explain(error: BaseException) -> str | None:
    """Return the prediction for the largest model, and what would fit; None for other errors."""
    is_cpu = isinstance(error, RuntimeError) and any(p in str(error) for p in CPU_PHRASES)
    if not (isinstance(error, torch.OutOfMemoryError) or is_cpu):
        return None
    if not (_last and _last[0][0] is error):
        watched = [w for w in _watched if w.inputs is not None]
        text = None
        if watched:
            largest = max(watched, key=lambda w: nbytes_of(w.setup.model))
            try:
                text = _explain(largest, error)
            except Exception:  # the error itself is shown then
                text = None
        _last[:] = [(error, text)]
    return _last[0][1]


def _explain(watched: _Watched, error: BaseException) -> str:
    from .choose import predict_setup  # imports much, and only after an error

    predicted = predict_setup(watched.setup, watched.inputs, watched.ranks)
    level = Layout(zero=watched.layout.zero)
    (now,) = [choice for choice in predicted if choice.layout == level]
    available = available_bytes(watched.setup.device)
    first = str(error).strip().splitlines()[0]
    name = f"layout={now.axes!r}" + (" with recompute" if watched.setup.recomputes else "")
    return (
        f"out of memory ({first}). The predicted peak of this rank with {name} is "
        f"{size_text(now.memory.total)}, of it {largest_category(now)}, in {now.place}. It can "
        f"take {size_text(available)}. HINT: {_smallest_change(now, predicted, available, watched)}"
    )


def _smallest_change(
    now: LayoutMemory, predicted: Sequence[LayoutMemory], available: int, watched: _Watched
) -> str:
    """Return the fastest layout that fits, else the largest batch."""
    for choice in predicted:
        if choice.memory.total <= available and choice.memory.total < now.memory.total:
            options = [f"layout={choice.axes!r}"] if choice.axes != now.axes else []
            options += [f"recompute={choice.layout.recompute!r}"] if choice.layout.recompute else []
            needed = size_text(choice.memory.total)
            return f"world.distribute(..., {', '.join(options)}) needs {needed}"
    by_batch = now.memory.activations + now.memory.temporary
    rest = replace(now.memory, activations=0, temporary=0).total
    assert watched.inputs is not None
    leaves = tree_leaves((watched.inputs.args, watched.inputs.options))
    sizes = [t.shape[0] for t in leaves if torch.is_tensor(t) and t.dim()]
    count = int(sizes[0] * (available - rest) / by_batch) if sizes and by_batch else 0
    if 0 < count < (sizes[0] if sizes else 0):
        return f"use a batch of {count} instead of {sizes[0]} samples per rank"
    return "use more ranks, or a smaller model or batch"
