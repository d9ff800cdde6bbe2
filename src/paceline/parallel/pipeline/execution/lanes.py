"""Messages between two neighbouring stages, in one direction.

A send never waits for the other stage, and a receive is posted before it is needed, so no order of
computations that a schedule gives can deadlock. Messages of a lane arrive in the order of sending.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import Mesh


class Lane:
    """The messages between this rank and one other.

    Args:
        peer: Global rank of the other one.
        tag: Distinguishes the lanes between two ranks.
    """

    def __init__(self, mesh: Mesh, group: Any, peer: int, tag: int) -> None:
        self.mesh, self.group, self.peer, self.tag = mesh, group, peer, tag
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()
        self._expected: deque[tuple[list[torch.Tensor], list[Any]]] = deque()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send a message of tensors; they must not be changed in place before it has left."""
        flat = [tensor.detach().contiguous() for tensor in tensors]
        works = [
            self._try(lambda t=one: dist.isend(t, self.peer, self.group, self.tag)) for one in flat
        ]
        self._sent.append(list(zip(works, flat, strict=True)))

    def expect(self, buffers: Sequence[torch.Tensor]) -> None:
        """Begin to receive the tensors of the next message."""
        works = [
            self._try(lambda b=one: dist.irecv(b, self.peer, self.group, self.tag))
            for one in buffers
        ]
        self._expected.append((list(buffers), works))

    def receive(self) -> list[torch.Tensor]:
        """Wait for the oldest expected message, and return its tensors."""
        buffers, works = self._expected.popleft()
        for work in works:
            self._try(work.wait)
        return buffers

    def settle(self, unfinished: int = 0) -> None:
        """Wait until at most this many messages have not left."""
        while len(self._sent) > unfinished:
            for work, _ in self._sent.popleft():
                self._try(work.wait)

    def settle_oldest(self) -> None:
        """Free the oldest message, which the other stage has answered."""
        self.settle(max(len(self._sent) - 1, 0))

    def _try(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline: {self.mesh.name()} lost {self.mesh.name(self.peer)}, with which it "
                f"exchanges activations: {error}"
            ) from error
