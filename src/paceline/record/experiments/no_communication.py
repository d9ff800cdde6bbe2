"""A process group whose collectives move no data, to measure a step without communication.

Outputs hold this rank's own inputs, so that later computations find values of the right shape and
dtype. PyTorch's ``FakeProcessGroup`` fills them. Its futures hold no value, which DDP needs, so
they are replaced. Python objects that only one rank has are sent all the same, because the other
ranks could not unpickle anything else; so is all that torch.distributed.checkpoint sends, because
its ranks plan a checkpoint together.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..completed_future import completed_future
from ..hooks.collectives import METHODS
from .lines.collective_calls import carries_objects, serves_checkpoint

# Work objects to keep alive, which C++ does not do before PyTorch 2.9. Each one keeps its tensors,
# whose memory a training would have freed and reused.
MAX_HELD_WORKS = 0 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9) else 64


class NoCommunicationGroup:
    """A stand-in for ``inner`` that replaces its collectives and delegates everything else."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        self._inner = inner
        self._held_works: list[dist.Work] = []
        self._fake = dist.ProcessGroup(c10d.HashStore(), inner.rank(), inner.size())
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._fake._set_default_backend(kind)
        untyped: Any = c10d  # its stub lacks FakeProcessGroup
        backend = untyped.FakeProcessGroup._create_internal(inner.rank(), inner.size())
        for device in inner._device_types:
            self._fake._register_backend(device, kind, backend)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            return getattr(self._inner, name)
        caller = sys._getframe(1)
        if name in ("broadcast", "scatter") and carries_objects(caller):
            return getattr(self._inner, name)
        if serves_checkpoint(caller):
            return getattr(self._inner, name)
        return self._with_future_value(getattr(self._fake, name))

    def _with_future_value(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> dist.Work | None:
            if method(*args, **options) is None:
                return None
            future = completed_future(args[0] if args else None)
            untyped: Any = c10d
            work: dist.Work = untyped._create_work_from_future(future)
            if MAX_HELD_WORKS:
                self._held_works = [*self._held_works[-MAX_HELD_WORKS:], work]
            return work

        return call

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Return at once, without waiting for other ranks."""
