"""Assign the samples of fetched batches to training steps. Needs no torch."""

# Batches fetched before their backward. If there are more, the script only reads the data.
MAX_BATCHES_AHEAD = 16


class SampleCounter:
    """Counter of the samples of each training step.

    A batch is *ahead* while no backward has followed its fetch, and *claimed* from the backward
    on. A framework that prefetches has fetched more batches before the first step than between
    later ones: batch n + 1 is fetched before batch n is trained. That many batches are held back
    from then on, so that each step counts the batches that it trains.
    """

    def __init__(self) -> None:
        self._ahead: list[int] = []
        self._claimed: list[int] = []  # since the last step
        self._held: list[int] = []  # claimed batches that a later step trains
        self._prefetched: int | None = None  # batches; None until two steps were seen
        self._iterator: object = None  # iterator of the loader that trains
        self._first_step: list[int] | None = None  # batches claimed by the iterator's first step
        self._is_exhausted = False
        self._batches_per_step = 1

    @property
    def holds_batches(self) -> bool:
        """Whether a fetched batch is still to be trained."""
        return bool(self._held)

    def add_ahead(self, samples: int) -> None:
        self._ahead.append(samples)

    def discard_ahead(self) -> None:
        self._ahead = []

    def claim(self, iterator: object, samples: int) -> None:
        """Count a batch, and those fetched before it, as trained by the current step."""
        if iterator is not None and (iterator != self._iterator or self._is_exhausted):
            self._begin_iterator(iterator)
        if len(self._ahead) <= MAX_BATCHES_AHEAD:
            self._claimed += self._ahead
        self._ahead = []
        if samples:
            self._claimed.append(samples)

    def _begin_iterator(self, iterator: object) -> None:
        if self._is_exhausted and self._held:
            self._prefetched = 0  # no step followed the last fetch: nothing was prefetched
        self._iterator, self._first_step, self._held = iterator, None, []
        self._is_exhausted = False

    def exhaust(self, iterator: object) -> None:
        """Note that an iterator has no more batches."""
        if iterator == self._iterator:
            self._is_exhausted = True

    def end_step(self) -> int:
        """Return the number of samples of the step that ends now."""
        claimed, self._claimed = self._claimed, []
        if self._prefetched == 0:
            return sum(claimed)
        if not claimed:
            trained = self._held[: self._batches_per_step] if self._is_exhausted else []
            self._held = self._held[len(trained) :]
            return sum(trained)
        if self._first_step is None:
            self._first_step = claimed
        elif self._prefetched is None:
            self._prefetched = max(len(self._first_step) - len(claimed), 0)
            if self._prefetched:
                self._held = self._first_step[-self._prefetched :]
        batches = self._held + claimed
        # Each step trains at least one batch.
        count = max(len(batches) - (self._prefetched or 0), 1)
        self._held, self._batches_per_step = batches[count:], count
        return sum(batches[:count])
