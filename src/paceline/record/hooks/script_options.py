"""Restored optimizers and schedulers that keep the options which the script has given them.

In population-based training a trial continues from the checkpoint of another one, with other
parameters. ``load_state_dict`` of PyTorch replaces the options of an optimizer (learning rate,
momentum, weight decay) and the base rates of its schedulers by those in the checkpoint, so a
learning rate that the search has changed would be lost. With these hooks

- every argument of the optimizer is that of the script, as it was before ``load_state_dict``,
- a learning rate that a scheduler has changed since the beginning is multiplied by the ratio of the
  script's first rate to that of the checkpoint: the schedule continues where it was,
- a scheduler keeps the arguments and base rates that the script has given it.

Where the options are equal, nothing changes. Rank 0 names the options that differ.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from ..ring.launcher_messages import notify

# Of a group, beside the arguments of the optimizer: bounds that schedulers add. Other entries, such
# as counters of an optimizer, are state.
_BOUNDS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_CYCLED = {"momentum", "betas"}  # are set by OneCycleLR and CyclicLR, whose bounds are in the group
_BASES = ("base_lrs", "max_lrs")  # of a scheduler
_NO_ARGUMENTS = {"self", "optimizer", "last_epoch", "params", "lr"}


def install(optim: Any) -> None:
    """Wrap ``load_state_dict`` of ``torch.optim``'s optimizers and schedulers."""
    scheduler: type = optim.lr_scheduler.LRScheduler
    kinds = {one for one in vars(optim.lr_scheduler).values() if isinstance(one, type)}
    for kind in kinds | {optim.Optimizer}:
        if "load_state_dict" in vars(kind):
            keep = _keep_schedule if issubclass(kind, scheduler) else _keep_options
            setattr(kind, "load_state_dict", _wrapped(vars(kind)["load_state_dict"], keep))  # noqa: B010


def _wrapped(
    load: Callable[..., Any], keep: Callable[[Any, Callable[[], Any]], Any]
) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_state_dict(self: Any, *args: Any, **options: Any) -> Any:
        return keep(self, lambda: load(self, *args, **options))

    return load_state_dict


def _keep_options(optimizer: Any, load: Callable[[], Any]) -> Any:
    """Load an optimizer's state, and restore the options of its groups."""
    own = [dict(group) for group in optimizer.param_groups]
    result = load()
    kind, kept = type(optimizer).__name__, dict[str, None]()
    for before, group in zip(own, optimizer.param_groups, strict=True):
        base, saved = _first_rate(before), _first_rate(group)
        if base is not None and saved is not None and base != saved:
            rate = float(group["lr"])
            group["lr"] = _like(
                before["lr"], base if rate == saved or not saved else rate * (base / saved)
            )
            kept[f"lr {base:.6g} instead of {saved:.6g}"] = None
        for name in sorted((_arguments(optimizer) | _BOUNDS) & before.keys()):
            value, other = before[name], group.get(name)
            is_cycled = name in _CYCLED and "max_momentum" in group
            if is_cycled or not _differs(value, other):
                continue
            if name not in _BOUNDS:  # bounds follow from the rate
                kept[f"{name} {value} instead of {other}"] = None
            group[name] = value
    if kept and os.environ.get("RANK", "0") == "0":
        notify(
            f"paceline: {kind} is restored from a checkpoint, and keeps the options of this "
            f"trial: {', '.join(kept)}\n"
        )
    return result


def _first_rate(group: dict[str, Any]) -> float | None:
    """Return the rate with which a group began: schedulers store it; None if it has no rate."""
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def _like(before: Any, rate: float) -> Any:
    """Return a rate as a number, or as a tensor where the optimizer has one."""
    return before.new_tensor(rate) if hasattr(before, "new_tensor") else rate


def _arguments(thing: Any) -> set[str]:
    """Return the names of the arguments with which an optimizer or a scheduler is constructed."""
    makers = (vars(kind).get("__init__") for kind in type(thing).__mro__ if kind is not object)
    names = (inspect.signature(make).parameters for make in makers if make is not None)
    return {name for each in names for name in each} - _NO_ARGUMENTS


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return list(value) != list(other)  # a checkpoint may have a list for a tuple
    try:
        return bool(value != other)
    except (RuntimeError, ValueError):  # tensors of several elements
        return False


def _keep_schedule(scheduler: Any, load: Callable[[], Any]) -> Any:
    """Load a scheduler's state, and restore its arguments and base rates."""
    own = dict(vars(scheduler))
    result = load()
    loaded = vars(scheduler)
    saved, base = loaded.get("base_lrs"), own.get("base_lrs")
    last = loaded.get("_last_lr")
    if saved and base and last and len(saved) == len(base) == len(last):
        scheduler._last_lr = [
            rate if float(b) == float(s) or not float(s) else rate * (float(b) / float(s))
            for rate, b, s in zip(last, base, saved, strict=True)
        ]
    for name in (*_BASES, *sorted(_arguments(scheduler))):
        if name in own and name in loaded:
            setattr(scheduler, name, own[name])
    return result
