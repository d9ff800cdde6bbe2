"""Process sets: subsets of the ranks that run collectives of their own."""

from collections.abc import Iterable
from typing import Any


class ProcessSet:
    """A set of ranks.

    Pass it to ``hvd.init(process_sets=[...])`` or ``hvd.add_process_set``, then to collectives.

    Attributes:
        process_set_id: Number of the set; None while it is not registered.
        ranks: Global ranks, in ascending order.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    _own_rank = -1  # global rank of this process

    def __init__(self, ranks_or_comm: Any) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet: {type(ranks_or_comm).__name__} is not a list of ranks; communicators "
                "of MPI are not supported. HINT: ProcessSet(comm.group.Translate_ranks(...)), or "
                "ProcessSet([0, 1])"
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks; this is "
                f"{ranks}. HINT: ProcessSet([0, 1])"
            )
        self.ranks = ranks

    def _register(self, number: int, ranks: list[int], own_rank: int) -> None:
        self.process_set_id, self.ranks, self._own_rank = number, ranks, own_rank

    def _invalidate(self) -> None:
        self.process_set_id = None
        self.ranks = None

    def size(self) -> int | None:
        """Return the number of ranks, or None before ``hvd.init()``."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Return the rank of this process in the set, or None before ``hvd.init()``.

        Raises:
            ValueError: This process is not in the set.
        """
        if self.process_set_id is None:
            return None
        own = self._own_rank
        if own not in (self.ranks or ()):
            raise ValueError(
                f"rank {own} is not in process set {self.process_set_id} (ranks {self.ranks}). "
                "HINT: if process_set.included()"
            )
        assert self.ranks is not None
        return self.ranks.index(own)

    def included(self) -> bool | None:
        """Return whether this process is in the set, or None before ``hvd.init()``."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return self._own_rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
