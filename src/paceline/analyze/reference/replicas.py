"""Detect ranks whose parameters drift apart, from checksums."""

from dataclasses import dataclass, field

MIN_EQUAL = 3  # comparisons in a row in which ranks agreed, so that they are replicas
MIN_DIFFERENT = 2  # comparisons in a row in which they differ


@dataclass(frozen=True)
class ReplicaDifference:
    """Ranks hold other parameters than before.

    Attributes:
        equal_at: Last step at which they were equal.
        step: First step at which they differed.
        ranks: Ranks that differ from most of the others (from rank 0 where there is no majority).
    """

    equal_at: int
    step: int
    ranks: list[int]


@dataclass
class ReplicaWatch:
    """The checksums of the ranks. ``difference`` stays once it was found."""

    ranks: int
    difference: ReplicaDifference | None = None
    _equal: int = 0
    _equal_at: int = 0
    _different: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def add(self, step: int, bits: dict[int, int]) -> ReplicaDifference | None:
        """Add the checksums of a step; return a difference when it is first certain."""
        if self.difference is not None or self.ranks < 2 or len(bits) < self.ranks:
            return None
        if len(set(bits.values())) == 1:
            if self._different:  # they differ between averages, as in local SGD
                self._equal = 0
            self._equal, self._equal_at, self._different = self._equal + 1, step, []
            return None
        if self._equal < MIN_EQUAL:
            self._equal = 0
            return None
        self._different.append((step, bits))
        if len(self._different) < MIN_DIFFERENT:
            return None
        first, values = self._different[0]
        counts = sorted(values.values(), key=list(values.values()).count)
        usual = counts[-1] if list(values.values()).count(counts[-1]) > 1 else values[min(values)]
        ranks = sorted(rank for rank, value in values.items() if value != usual)
        self.difference = ReplicaDifference(self._equal_at, first, ranks)
        return self.difference
