"""A process group whose collectives move nothing: what a step takes without its exchange.

Outputs hold this rank's own inputs, so that whoever computes with them finds numbers of the right
size. PyTorch's process group that does nothing fills them; its futures hold no value, which DDP
needs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ..hooks.collectives import METHODS

# Works that are kept alive: before PyTorch 2.9 C++ does not. Each holds on to its tensors, which a
# training would have freed and used again.
MAX_HELD_WORKS = 0 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9) else 64


class NoCommunicationGroup:
    """In the place of ``inner``, for all that communicates; the rest is passed on."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        self._inner = inner
        self._held: list[dist.Work] = []
        self._fake = dist.ProcessGroup(c10d.HashStore(), inner.rank(), inner.size())
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._fake._set_default_backend(kind)
        fake: Any = c10d  # whose stub lacks what follows
        nothing = fake.FakeProcessGroup._create_internal(inner.rank(), inner.size())
        for device in inner._device_types:
            self._fake._register_backend(device, kind, nothing)

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            return getattr(self._inner, name)
        return self._done(getattr(self._fake, name))

    def _done(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> dist.Work | None:
            if method(*args, **options) is None:
                return None
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(args[0] if args else None)
            made: Any = c10d
            work: dist.Work = made._create_work_from_future(future)
            if MAX_HELD_WORKS:
                self._held = [*self._held[-MAX_HELD_WORKS:], work]
            return work

        return call

    def monitored_barrier(self, *args: Any, **options: Any) -> None:
        """Nobody is waited for."""
