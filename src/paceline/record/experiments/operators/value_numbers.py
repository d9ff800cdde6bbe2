"""Numbers of tensor values within a step: equal operators on equal values are a repetition.

Each operator is identified by its function and the numbers of its inputs. If the same operator was
called before with the same numbers, its outputs get the same numbers again. A tensor that was
changed in place, and the output of a random operator, gets a new number.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from ...hooks.flop_counter import tensors_in

_torch_c: Any = torch._C
_WeakTensorRef = _torch_c._WeakTensorRef  # unlike weakref.ref, survives Python's object


@dataclass(slots=True)
class _Known:
    """One tensor: a weak reference, its version when it was numbered, and its producer."""

    ref: Any
    version: int
    number: int
    producer: Any


class ValueNumbers:
    """Table of the tensors of a step, by their identity and version."""

    def __init__(self) -> None:
        self._count = count()
        self._known: dict[int, _Known] = {}
        self._results: dict[Any, tuple[list[int], Any]] = {}  # of a key: numbers, and producer

    def begin_step(self) -> None:
        """Forget which operators were called; keep which operator produced which tensor."""
        self._results.clear()
        dead = [key for key, known in self._known.items() if known.ref.expired()]
        for key in dead:
            del self._known[key]

    def producers(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Return the producers of these tensors, as far as they are known."""
        known = [one for tensor in tensors if (one := self._known.get(id(tensor))) is not None]
        return [one.producer for one in known if one.producer and not one.ref.expired()]

    def key(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the identity of a call, or None if its arguments cannot be compared."""
        try:
            key = (function, self._freeze(args), self._freeze(tuple(kwargs.items())))
            hash(key)
        except TypeError:
            return None
        return key

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ("tensor", self._number(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._freeze, value))
        return (type(value), value)

    def _number(self, tensor: torch.Tensor) -> int:
        known, version = self._known.get(id(tensor)), _version(tensor)
        if known is not None and known.version == version and not known.ref.expired():
            return known.number
        producer = known.producer if known is not None and not known.ref.expired() else None
        return self._store(tensor, next(self._count), producer)

    def _store(
        self, tensor: torch.Tensor, number: int, producer: Any, base: torch.Tensor | None = None
    ) -> int:
        # Autograd lets a view share the version of its base only after the dispatch mode.
        version = _version(tensor if base is None else base)
        self._known[id(tensor)] = _Known(_WeakTensorRef(tensor), version, number, producer)
        return number

    def store_outputs(
        self, key: Any, out: Any, producer: Any, base: torch.Tensor | None = None
    ) -> Any:
        """Number the outputs of a call; return the producer of the same call before, or None.

        Args:
            key: Identity of the call. None for a random operator, or one that changes its inputs:
                the numbers are new.
            base: The tensor whose memory the outputs share, for a view.
        """
        outputs = list(tensors_in((out,)))
        numbers, earlier = self._results.get(key, ([], None)) if key is not None else ([], None)
        if earlier is None or len(numbers) != len(outputs):
            earlier, numbers = None, [next(self._count) for _ in outputs]
            if key is not None:
                self._results[key] = numbers, producer
        for tensor, number in zip(outputs, numbers, strict=True):
            self._store(tensor, number, producer, base)
        return earlier

    def alias(self, out: Any, tensor: torch.Tensor, producer: Any) -> None:
        """Give the output of ``detach`` or ``alias`` the number of its input."""
        for one in tensors_in((out,)):
            self._store(one, self._number(tensor), producer, tensor)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
