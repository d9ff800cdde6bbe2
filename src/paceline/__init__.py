"""Paceline: run a training script on N ranks, and see where the time of every rank goes."""

from typing import TYPE_CHECKING, Any

from .record.hooks.import_hooks import after_import as _after_import
from .version import __version__ as __version__

__all__ = ["BatchSchedule", "Layout", "World", "divide_dims", "from_rank_0", "init", "per_rank"]

if TYPE_CHECKING:
    from . import tune as tune
    from .cost.layout import Layout
    from .world import BatchSchedule, World, divide_dims, from_rank_0, init, per_rank


def _register_backend(c10d: Any) -> None:
    """Register the "paceline" backend of torch.distributed.

    Its modules are imported on first use, as torch is not imported completely yet.
    """

    def create(options: Any, backend_options: Any) -> Any:
        from .comm.backend import create

        return create(options, backend_options)

    devices = ["cpu", "cuda"]
    c10d.Backend.register_backend("paceline", create, extended_api=True, devices=devices)


_after_import({"torch.distributed.distributed_c10d": _register_backend})


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the launcher and the reports start without torch.
    if name == "Layout":
        from .cost.layout import Layout

        return Layout
    if name == "tune":
        from importlib import import_module

        return import_module(".tune", __name__)
    if name in __all__:
        from . import world

        return getattr(world, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
