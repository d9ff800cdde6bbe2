"""Names and groups of the parameters of an optimizer, checked."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

NAMED_HINT = "HINT: named_parameters=model.named_parameters()"
MAX_NAMED = 8  # names in a message


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def default_names(optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """Return names made of the numbers of the group and of the parameter in it."""
    return {
        parameter: f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }


def check_names(optimizer: Optimizer, named: Iterable[Any] | None) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of the optimizer.

    Args:
        named: Pairs of name and parameter, or None for names made of numbers.

    Raises:
        ValueError: They are no pairs, a name occurs twice, or a parameter has no name.
    """
    if named is None:
        return default_names(optimizer)
    pairs = list(named.items()) if isinstance(named, dict) else list(named)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually "
                f"produced by model.named_parameters(); this has an item of type "
                f"{type(pair).__name__}. {NAMED_HINT}"
            )
    counts = Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{_listed(twice)}. HINT: give the parameters of each model a prefix of their own"
        )
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in pairs}
    absent = [
        f"parameter {j} of group {i}, shape {tuple(parameter.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if absent:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{_listed(absent)}. {NAMED_HINT} of every model that the optimizer updates"
        )
    return {parameter: names[parameter] for parameter in parameters_of(optimizer)}


def groups_of(num_groups: int, groups: Any, level: int) -> Any:
    """Return ``groups=`` of a DistributedOptimizer, whose former name is ``num_groups``.

    Args:
        level: Of the script's call, for the warning.
    """
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`",
            DeprecationWarning,
            stacklevel=level,
        )
    return groups if groups is not None or not num_groups else num_groups


def number_or_groups(groups: Any, members: str, kind: type = object) -> int | list[list[Any]]:
    """Return ``groups=`` of a DistributedOptimizer: a number of groups, or the groups.

    Args:
        groups: The argument.
        members: What a group contains, in messages.
        kind: Type of the members.

    Raises:
        ValueError: It is neither.
    """
    if groups is None:
        return 0
    rule = f"groups should be a non-negative integer or a list of list of {members}"
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"{rule}; this is {groups}")
        return groups
    if not isinstance(groups, list | tuple):
        raise ValueError(f"{rule}; this is of type {type(groups).__name__}")
    for number, group in enumerate(groups):
        is_list = isinstance(group, list | tuple)
        if not is_list or not all(isinstance(one, kind) for one in group):
            raise ValueError(f"{rule}; item {number} is not a list of {members}")
    return [list(group) for group in groups]


def check_groups(groups: Any) -> int | list[list[torch.Tensor]]:
    """Return ``groups=`` of the DistributedOptimizer of PyTorch, as ``number_or_groups``.

    Raises:
        ValueError: It is invalid, or a parameter is in two groups.
    """
    found = number_or_groups(groups, "torch.Tensor", torch.Tensor)
    seen: set[int] = set()
    for number, group in enumerate([] if isinstance(found, int) else found):
        for one in group:
            if id(one) in seen:
                raise ValueError(
                    "a parameter can only appear once in groups; one of shape "
                    f"{tuple(one.shape)} appears again in group {number}"
                )
            seen.add(id(one))
    return found


def split_evenly(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """Return ``items`` in at most ``parts`` consecutive lists whose lengths differ by at most 1."""
    parts = min(parts, len(items))
    bounds = [len(items) * i // parts for i in range(parts + 1)] if parts else [0]
    return [list(items[a:b]) for a, b in pairwise(bounds)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
