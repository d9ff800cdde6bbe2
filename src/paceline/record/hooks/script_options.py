"""Restored optimizers and schedulers that keep the options which the script has given them.

In population-based training a trial continues from the checkpoint of another one, with other
parameters. ``load_state_dict`` of PyTorch replaces the options of an optimizer (learning rate,
momentum, weight decay) and the base rates of its schedulers by those in the checkpoint, so a
learning rate that the search has changed would be lost. With these hooks

- every argument of the optimizer is that of the script, as it was before ``load_state_dict``,
- a learning rate that has changed since the beginning, by a scheduler or in place, is multiplied by
  the ratio of the script's first rate to that of the checkpoint: the schedule continues where it
  was,
- a scheduler keeps the arguments and base rates that the script has given it.

PyTorch's ``LRScheduler`` stores the first rate of a group, ``ReduceLROnPlateau`` does not. Each
group therefore stores the rate with which it was constructed, under a name that PyTorch does not
use: a scheduler takes its base rate from the group when it is constructed, perhaps after the script
has scaled the rate.

Where the options are equal, nothing changes. Rank 0 names the options that differ.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

from ..ring.launcher_messages import notify
from .taps import around

FIRST_RATE = "paceline_first_lr"  # of a group: the rate with which it was constructed
# Of a group, beside the arguments of the optimizer: bounds that schedulers add. Other entries, such
# as counters of an optimizer, are state.
_BOUNDS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_CYCLED = {"momentum", "betas"}  # are set by OneCycleLR and CyclicLR, whose bounds are in the group
_BASES = ("base_lrs", "max_lrs", "min_lrs")  # of a scheduler
_NO_ARGUMENTS = {"self", "optimizer", "last_epoch", "params", "lr"}


def install(optim: Any) -> None:
    """Wrap methods of ``torch.optim``: ``load_state_dict`` of optimizers and schedulers, and
    ``Optimizer.add_param_group``, which the constructors call for each group.
    """
    around(optim.Optimizer, "add_param_group", _store_rate)
    scheduler: type = optim.lr_scheduler.LRScheduler
    kinds = {kind for kind in vars(optim.lr_scheduler).values() if isinstance(kind, type)}
    for kind in kinds | {optim.Optimizer}:
        if "load_state_dict" in vars(kind):
            keep = _keep_schedule if issubclass(kind, scheduler) else _keep_options
            around(kind, "load_state_dict", keep)


def _store_rate(add: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    result = add(self, *args, **options)
    group = self.param_groups[-1]
    if "lr" in group:
        group.setdefault(FIRST_RATE, float(group["lr"]))
    return result


def _keep_options(load: Callable[..., Any], optimizer: Any, *args: Any, **options: Any) -> Any:
    """Load an optimizer's state, and restore the options of its groups."""
    own = [dict(group) for group in optimizer.param_groups]
    result = load(optimizer, *args, **options)
    kind, kept, lost = type(optimizer).__name__, dict[str, None](), dict[str, None]()
    for before, group in zip(own, optimizer.param_groups, strict=True):
        if "lr" in before and "lr" in group:
            _keep_rate(before, group, kept, lost)
        for name in sorted((_arguments(optimizer) | _BOUNDS) & before.keys()):
            value, other = before[name], group.get(name)
            is_cycled = name in _CYCLED and "max_momentum" in group
            if is_cycled or not _differs(value, other):
                continue
            if name not in _BOUNDS:  # bounds follow from the rate
                kept[f"{name} {value} instead of {other}"] = None
            group[name] = value
    if os.environ.get("RANK", "0") == "0":
        if kept:
            notify(
                f"paceline: {kind} is restored from a checkpoint, and keeps the options of this "
                f"trial: {', '.join(kept)}\n"
            )
        if lost:
            notify(
                f"paceline: {kind} is restored from a checkpoint with {', '.join(lost)} of this "
                "trial: the checkpoint does not contain the learning rate with which its optimizer "
                "was constructed. HINT: only checkpoints of trials of a population contain it; to "
                "begin from another one, set the rate after load_state_dict\n"
            )
    return result


def _keep_rate(
    before: dict[str, Any], group: dict[str, Any], kept: dict[str, None], lost: dict[str, None]
) -> None:
    """Restore the rates of a group that was loaded; add what differs to ``kept`` or ``lost``."""
    base, saved = _first_rates(before, group)
    rate, own_first = float(group["lr"]), before.get(FIRST_RATE, base)
    group[FIRST_RATE] = own_first
    if saved is None:
        if rate != base:
            lost[f"lr {rate:.6g}, and not with lr {base:.6g}"] = None
        return
    if base == saved:
        return
    for name in ("lr", "initial_lr", "max_lr", "min_lr"):
        if name in group and (name == "lr" or name not in before):
            value = float(group[name])
            value = base if value == saved or not saved else value * (base / saved)
            group[name] = _like(before["lr"], value)
    kept[f"lr {base:.6g} instead of {saved:.6g}"] = None


def _first_rates(before: dict[str, Any], group: dict[str, Any]) -> tuple[float, float | None]:
    """Return the first rates of the script and of the checkpoint; None: it has none.

    They are rates of the same place in the script: where the scheduler was constructed, or else the
    optimizer.

    Args:
        before: The group as the script has made it.
        group: The group as it was loaded.
    """
    rate, constructed = float(before["lr"]), before.get(FIRST_RATE)
    saved, scheduled = group.get(FIRST_RATE), group.get("initial_lr")
    if "initial_lr" in before:
        first = saved if scheduled is None else scheduled
        return float(before["initial_lr"]), None if first is None else float(first)
    if constructed == rate and saved is not None:
        return rate, float(saved)
    if scheduled is not None:  # the scheduler will be constructed with the present rate
        return rate, float(scheduled)
    if saved is None:
        return rate, None
    # The script has changed the rate after construction: scaled it, or replaced a constant.
    if constructed is not None and constructed != saved:
        return float(constructed), float(saved)
    return rate, float(group["lr"])


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


def _keep_schedule(load: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Load a scheduler's state, and restore its arguments and base rates."""
    own = dict(vars(scheduler))
    result = load(scheduler, *args, **options)
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
