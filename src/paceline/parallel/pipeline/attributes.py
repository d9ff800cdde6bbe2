"""What the attributes of a module contain, so that a change of one is seen.

Numbers, texts and functions are compared by value, also in lists, dicts and objects of nothing
else, such as a configuration; all others by identity.
"""

import enum
import random
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...record.hooks.phases import UncopiedHook

MAX_ITEMS = 4096  # of one attribute that are compared in each step
MAX_DEPTH = 6
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_CONSTANTS = (*SIMPLE, torch.dtype, torch.device, torch.Size, enum.Enum)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)  # a deep copy is the same
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Content:
    """What an attribute contains; ``is_plain``: compared by value alone."""

    parts: tuple[Any, ...]
    is_plain: bool


def contents(module: nn.Module, memo: dict[int, Content] | None = None) -> dict[str, Content]:
    """Return the content of each attribute of a module, and of its hooks but those of Paceline.

    Args:
        memo: Content by the id of values that several modules share.
    """
    memo = {} if memo is None else memo
    found = {k: _content(v, memo) for k, v in vars(module).items() if k not in _OF_MODULES}
    hooks = [
        id(hook)
        for key in sorted(_OF_MODULES)
        if key.startswith(("_forward", "_backward")) and key.endswith("_hooks")
        for hook in vars(module)[key].values()
        if not isinstance(hook, UncopiedHook)
    ]
    return found | {"hooks": Content(tuple(hooks), is_plain=False)}


def _content(value: Any, memo: dict[int, Content]) -> Content:
    if id(value) not in memo:
        parts: list[Any] = []
        is_plain = _add(value, parts, 0)
        memo[id(value)] = Content(tuple(parts), is_plain)
    return memo[id(value)]


def _add(value: Any, parts: list[Any], depth: int) -> bool:
    """Add what a value contains to parts; return whether it is plain."""
    if isinstance(value, _CONSTANTS):
        parts.append((type(value).__name__, repr(value)))
        return True
    if isinstance(value, _FUNCTIONS):
        parts.append(id(value))
        return True
    state = _state_of_generator(value)
    if state:
        parts.append(state)
        return True
    is_opaque = isinstance(value, (nn.Module, torch.Tensor))
    if is_opaque or depth == MAX_DEPTH or len(parts) >= MAX_ITEMS:
        parts.append(id(value))
        return False
    if isinstance(value, Mapping):
        return _add_all([*value.keys(), *value.values()], value, parts, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _add_all(list(value), value, parts, depth)
    own: list[Any] = []
    vars_of = getattr(value, "__dict__", None)
    if vars_of and _add_all([*vars_of.keys(), *vars_of.values()], value, own, depth):
        parts.extend(own)
        return True
    parts.append(id(value))
    return False


def _add_all(items: list[Any], of: Any, parts: list[Any], depth: int) -> bool:
    parts.append((type(of).__qualname__, len(items)))
    are_plain = [_add(item, parts, depth + 1) for item in items[: MAX_ITEMS + 1]]
    return all(are_plain)


def _state_of_generator(value: Any) -> str:
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", None)
        return repr(bits.state) if bits is not None else ""
    return ""


class KeptByAnotherStage:
    """Stands for a tensor that another stage has; each use of it is an error.

    One process has the tensor, and a loss that reads it would silently leave it out otherwise.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            f"pipeline: the forward keeps {self.name} as an attribute, and another stage runs it: "
            "this rank does not have it. HINT: return it from the forward, if the loss uses it"
        )

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # Python asks for what it may use, such as __deepcopy__
            raise AttributeError(key)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        next(leaf for leaf in tree_leaves(given) if isinstance(leaf, cls))._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
    __float__ = __bool__ = __len__ = __iter__ = __getitem__ = _refuse


def mark_kept(model: nn.Module, kept: Mapping[str, Any], run_here: Iterable[str]) -> None:
    """Replace attributes that other stages keep, and that are None here.

    Args:
        kept: What the attributes were before the forward, by name.
        run_here: Names of the modules that this rank runs as a whole.
    """
    prefixes = tuple(f"{name}." for name in run_here)
    for name, before in kept.items():
        owner, _, key = name.rpartition(".")
        if before is None and not name.startswith(prefixes):
            setattr(model.get_submodule(owner), key, KeptByAnotherStage(name))
