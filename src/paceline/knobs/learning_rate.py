"""Knob of the learning rate, and learning rates that hold for one step only.

A factor that is applied for the time of a step works with every scheduler: those set the rate that
the script sees, and do not see the factor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..record.hooks.taps import LOAD_OPTIMIZER, on_step
from .knob import KnobResult

NAME = "learning-rate-factor"


@contextmanager
def scaled_rates(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimizer by a factor within a ``with`` statement."""
    rates = _multiply(optimizer, factor)
    try:
        yield
    finally:
        _restore(optimizer, rates)


def _multiply(optimizer: Any, factor: float) -> list[tuple[Any, Any]]:
    """Multiply the learning rates; return those before and those that were set."""
    if factor == 1.0:
        return []
    rates = []
    for group in optimizer.param_groups:
        before = group["lr"]
        group["lr"] = before * factor
        rates.append((before, group["lr"]))
    return rates


def _restore(optimizer: Any, rates: list[tuple[Any, Any]]) -> None:
    """Restore the learning rates, but not one that the step itself has changed."""
    for group, (before, during) in zip(optimizer.param_groups, rates, strict=False):
        if group["lr"] is during:
            group["lr"] = before


def factor(value: float, turned: KnobResult) -> None:
    """Multiply the learning rates of all optimizers of this process, in every step.

    The record then has the optimizers (``UsedOptimizer``).
    """
    _StepRates(value, turned).install()


@dataclass(frozen=True)
class UsedOptimizer:
    """An optimizer that has stepped.

    Attributes:
        kind: Its class.
        is_adaptive: Whether it divides updates by the size of earlier gradients, as Adam does.
        is_restored: Whether a saved state was loaded into one of this class.
    """

    kind: str
    is_adaptive: bool
    is_restored: bool

    @classmethod
    def of(cls, optimizer: Any, is_restored: bool) -> "UsedOptimizer":
        options = optimizer.param_groups[0]
        return cls(type(optimizer).__name__, bool({"betas", "eps"} & set(options)), is_restored)

    def __str__(self) -> str:
        flags = "+adaptive" * self.is_adaptive + "+restored" * self.is_restored
        return self.kind + flags

    @classmethod
    def parse(cls, text: str) -> "UsedOptimizer":
        kind, *flags = text.split("+")
        return cls(kind, "adaptive" in flags, "restored" in flags)


def used_optimizers(how: str) -> list[UsedOptimizer]:
    """Return the optimizers from the knob's entry in a record."""
    return [UsedOptimizer.parse(word) for word in how.split(",") if word]


class _StepRates:
    """The hooks of the knob in one process."""

    def __init__(self, factor: float, turned: KnobResult) -> None:
        self._factor, self._turned = factor, turned
        self._restored: set[str] = set()  # classes into which a saved state was loaded
        self._used: dict[str, UsedOptimizer] = {}
        self._rates: dict[int, list[tuple[Any, Any]]] = {}

    def install(self) -> None:
        on_step(self._before, self._after)
        LOAD_OPTIMIZER.before(self._note_restored)

    def _note_restored(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._restored.add(type(optimizer).__name__)

    def _before(self, optimizer: Any, *_: Any) -> None:
        self._rates[id(optimizer)] = _multiply(optimizer, self._factor)
        kind = type(optimizer).__name__
        if kind not in self._used:
            self._used[kind] = UsedOptimizer.of(optimizer, kind in self._restored)
            self._turned.done(",".join(map(str, self._used.values())))

    def _after(self, optimizer: Any, *_: Any) -> None:
        _restore(optimizer, self._rates.pop(id(optimizer), []))
