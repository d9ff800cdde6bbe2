"""Passes over the samples of a loader: the epoch of each pass, its order, and its position."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from .sample_order import preserve_random_states, seed_cpu_generators
from .samplers import Ordered

Key = tuple[int, int]  # epoch, sample
CHUNK_SAMPLES = 4096  # of an order that are converted to Python integers at a time


@dataclass
class Pass:
    """One pass over the samples of an epoch.

    Attributes:
        epoch: Epoch of the pass, from its start until it is completed or abandoned.
        batches: The remaining batches, as lists of (epoch, sample).
        position: Number of samples of the epoch that were returned.
        order_seed: Seed that the order was drawn with; None if the order depends on the epoch only.
        completed: Whether all batches were returned.
        returned: Number of batches that were returned in this pass.
        busy_s: CPU time of the workers.
        seconds: Time from the start of the pass to its last batch.
    """

    epoch: int
    batches: Iterator[list[Key]]
    position: int = 0
    order_seed: int | None = None
    completed: bool = False
    returned: int = 0
    busy_s: float = 0.0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self.epoch, "sample": self.position}
        return state if self.order_seed is None else {**state, "order_seed": self.order_seed}


class Passes:
    """The passes over one sampler: which epoch is next, and where the next pass starts.

    The epoch advances when a pass begins, so a pass that is abandoned is not repeated. An epoch
    set by ``set_epoch`` of this object or of the sampler takes precedence. The epoch of the next
    pass is that of an ``Ordered`` sampler, and is kept here for samplers of other kinds.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._sampler_epoch = self._epoch_of_sampler()  # when it was last looked at
        self._next = self._sampler_epoch or 0
        self._resume: dict[str, int] | None = None  # state of a pass to continue
        self._last: Pass | None = None  # the pass that began last

    @property
    def next_epoch(self) -> int:
        """Return the epoch of the next pass."""
        epoch = self._epoch_of_sampler()
        if epoch is not None and (
            isinstance(self.sampler, Ordered) or epoch != self._sampler_epoch
        ):
            return epoch
        return self._next

    @property
    def is_resuming(self) -> bool:
        """Return whether a position was loaded that the next pass continues at."""
        return self._resume is not None and any(self.state_dict().values())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also for the sampler if it has ``set_epoch``."""
        self._last = None
        self._set_next(epoch)
        if not isinstance(self.sampler, Ordered) and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        self._sampler_epoch = self._epoch_of_sampler()

    def state_dict(self) -> dict[str, int]:
        """Return the position in the pass that began last; after its end, the next epoch."""
        last, epoch = self._last, self.next_epoch
        if self._resume is not None and self._resume["epoch"] == epoch:
            return dict(self._resume)
        if last is not None and not last.completed and epoch == last.epoch + 1:
            return last.state_dict()
        return {"epoch": epoch, "sample": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the pass of this state in the next pass, unless another epoch is set first."""
        self.set_epoch(state["epoch"])
        self._resume = dict(state)

    def begin(self, batch_size: int, drop_last: bool, seed: int) -> Pass:
        """Begin the next pass.

        Args:
            batch_size: Samples per batch.
            drop_last: Whether to drop the last batch if it is smaller.
            seed: Seed of the order, if the sampler draws it from random generators.

        Raises:
            ValueError: The pass continues an earlier one, whose order can't be repeated.
        """
        epoch, resume, self._resume = self.next_epoch, self._resume, None
        self._set_next(epoch + 1)
        self._sampler_epoch = self._epoch_of_sampler()
        if resume is None or resume["epoch"] != epoch:
            resume = {"epoch": epoch, "sample": 0}
        start = resume["sample"]
        self._last = begun = Pass(epoch, iter(()), start)
        if isinstance(self.sampler, Ordered):
            order = self.sampler.order(self.sampler.seed, epoch)
        elif hasattr(self.sampler, "__len__"):
            order, begun.order_seed = self._draw(seed, resume)
        elif start:
            raise _not_repeatable(self.sampler, "Loader: the sampler")
        else:  # may be endless
            batches = BatchSampler(self.sampler, batch_size, drop_last)
            begun.batches = ([(epoch, int(i)) for i in batch] for batch in batches)
            return begun
        begun.batches = _batches(order, epoch, start, batch_size, drop_last)
        return begun

    def _draw(self, seed: int, resume: dict[str, int]) -> tuple[torch.Tensor, int]:
        """Return the order of a sampler of another kind, and the seed that it was drawn with."""
        if (own := _generator_of(self.sampler)) is not None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=own).item())
        given = resume.get("order_seed")
        seed = seed if given is None else given
        order = draw_order(self.sampler, seed)
        if resume["sample"]:
            # Without the seed of the earlier pass, only an order without random draws fits.
            again = seed + (given is None)
            check_order_repeats(self.sampler, order, again, "Loader: the sampler")
        return order, seed

    def _set_next(self, epoch: int) -> None:
        self._next = epoch
        if isinstance(self.sampler, Ordered):
            self.sampler.set_epoch(epoch)

    def _epoch_of_sampler(self) -> int | None:
        epoch = getattr(self.sampler, "epoch", None)
        return epoch if isinstance(epoch, int) else None


def _batches(
    order: torch.Tensor, epoch: int, start: int, size: int, drop_last: bool
) -> Iterator[list[Key]]:
    several = size * max(CHUNK_SAMPLES // size, 1)
    for begin in range(start, len(order), several):
        samples = order[begin : begin + several].tolist()
        for first in range(0, len(samples), size):
            batch = samples[first : first + size]
            if len(batch) == size or not drop_last:
                yield [(epoch, i) for i in batch]


def draw_order(sampler: Any, seed: int) -> torch.Tensor:
    """Return the order of a sampler of any kind, an int64 tensor of shape (samples,).

    The global random generators, and the ``generator`` of the sampler, have this seed while the
    sampler draws from them, and their previous state afterwards.
    """
    own = _generator_of(sampler)
    state = None if own is None else own.get_state()
    with preserve_random_states():
        seed_cpu_generators(seed)
        if own is not None:
            own.manual_seed(seed)
        try:
            return torch.tensor([int(i) for i in sampler], dtype=torch.int64)
        finally:
            if own is not None and state is not None:
                own.set_state(state)


def check_order_repeats(sampler: Any, order: torch.Tensor, seed: int, name: str) -> None:
    """Raise ValueError if the sampler does not give this order again.

    A pass that continues in another order would repeat some samples and leave out others.

    Args:
        sampler: A sampler of any kind.
        order: Its order, from ``draw_order``.
        seed: Seed of the second draw.
        name: The sampler's place, for the message.
    """
    if not torch.equal(order, draw_order(sampler, seed)):
        raise _not_repeatable(sampler, name)


def _not_repeatable(sampler: Any, name: str) -> ValueError:
    return ValueError(
        f"{name} {type(sampler).__name__} does not give the order of the earlier pass again, so "
        "that pass can't be continued: samples would be repeated and left out. HINT: shuffle=True, "
        "a sampler that draws from torch's, numpy's or random's global generator or from a "
        "`generator` attribute, or continue at the start of an epoch"
    )


def _generator_of(sampler: Any) -> torch.Generator | None:
    own = getattr(sampler, "generator", None)
    return own if isinstance(own, torch.Generator) else None
