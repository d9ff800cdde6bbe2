"""Paceline: a training script on N ranks, and where every second of every rank goes."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["World", "init"]

if TYPE_CHECKING:
    from .world import World, init


def __getattr__(name: str) -> Any:
    # Late, so that the launcher and the reports start without importing torch.
    if name in __all__:
        from . import world

        return getattr(world, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
