"""Containers of the script that get longer in each step: what keeps memory that should be freed.

The lengths of all containers are compared after the first step and after the measured steps. A
container is named by the variable or the attribute that refers to it.
"""

import gc
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

KINDS = (list, dict, set, deque)
MIN_GROWTH_PER_STEP = 0.9  # elements; a container that is filled once per step has 1
MAX_CONTAINERS = 1_000_000  # of a process: more are not compared
MAX_NAMED = 3
MAX_NAME_CHARS = 80
MAX_DEPTH = 3  # of containers within an element
MAX_PARTS = 64  # of an element that are looked at
LAST_ELEMENTS = 8  # whose bytes are measured
MIN_BYTES_PER_STEP = 64 << 10  # of tensors without a graph; less is not reported


class ContainerSizes:
    """Lengths of the containers of this process at one time."""

    def __init__(self) -> None:
        found = gc.get_objects()
        self._complete = len(found) <= MAX_CONTAINERS
        self._lengths = (
            {id(one): len(one) for one in found if type(one) in KINDS} if self._complete else {}
        )

    def growing(self, steps: int) -> list[dict[str, Any]]:
        """Return the containers with tensors that grew in each of ``steps`` steps since then.

        Each has name, elements and bytes per step, and whether its tensors keep their graphs.
        """
        if steps < 2 or not self._complete:
            return []
        grown = [
            one
            for one in gc.get_objects()
            if type(one) in KINDS
            and one is not self._lengths
            and len(one) - self._lengths.get(id(one), len(one)) >= MIN_GROWTH_PER_STEP * steps
        ]
        found: list[dict[str, Any]] = []
        for one in grown:
            added = (len(one) - self._lengths[id(one)]) / steps
            tensors = [list(_tensors(x, MAX_DEPTH)) for x in islice(_newest(one), LAST_ELEMENTS)]
            count = sum(tensor.nbytes for element in tensors for tensor in element)
            graphs = any(x.grad_fn is not None for element in tensors for x in element)
            each = added * count / max(len(tensors), 1)
            if not (graphs or each >= MIN_BYTES_PER_STEP):
                continue
            if name := _name_of(one):
                kind = type(one).__name__
                told = {"name": name[:MAX_NAME_CHARS], "kind": kind, "elements": round(added, 3)}
                found.append(told | {"bytes": round(each), "graphs": graphs})
        return sorted(found, key=lambda one: (not one["graphs"], -one["bytes"]))[:MAX_NAMED]


def _newest(container: Any) -> Iterable[Any]:
    values = container.values() if isinstance(container, dict) else container
    return iter(values) if isinstance(container, set) else reversed(values)


def _tensors(value: Any, depth: int) -> Iterable[Any]:
    """Yield the tensors of an element: itself, or those in its containers."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        for part in islice(parts, MAX_PARTS):
            yield from _tensors(part, depth - 1)


def _name_of(container: Any) -> str:
    """Return the variable or attribute of the script that refers to a container; "" if none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not _is_library(module):
            name = _key_of(container, frame.f_locals) or _key_of(container, frame.f_globals)
            if name:
                return f"{name} in {frame.f_code.co_name}()".replace(" in <module>()", "")
        frame = frame.f_back
    for owner in gc.get_referrers(container):
        values = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if isinstance(owner, ModuleType) or not isinstance(values, Mapping):
            continue
        name = _key_of(container, values)
        if not name:
            continue
        if "__name__" in values and "__builtins__" in values:  # the globals of a module
            module = str(values["__name__"])
            return "" if _is_library(module) else f"{module}.{name}"
        holder = owner if values is not owner else _holder_of(owner)
        kind = type(holder)
        if holder is not None and not _is_library(kind.__module__):
            return f"{kind.__name__}.{name}"
    return ""


def _holder_of(values: Mapping[Any, Any]) -> Any:
    """Return the object whose ``__dict__`` this is; None if it is an ordinary dictionary."""
    for owner in gc.get_referrers(values):
        if getattr(owner, "__dict__", None) is values:
            return owner
    return None


def _key_of(container: Any, values: Mapping[Any, Any]) -> str:
    named = (key for key, value in list(values.items()) if value is container)
    return next((key for key in named if isinstance(key, str)), "")


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("paceline", "torch", "gc")
