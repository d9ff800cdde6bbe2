"""Random numbers of a pipeline: those of a module depend on neither stages nor schedule.

Ranks that share samples draw equal numbers from the global generators, which must stay equal on all
of them. In a step, each event of each micro-batch draws from a seed of its own; afterwards the
generators continue as if nothing had been drawn but the seed of the step.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ODD = 0x9E3779B97F4A7C15  # golden ratio: seeds that follow each other differ in all bits
_BITS = (1 << 63) - 1


class RandomStreams:
    """The generators of one rank during a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._base = device, 0

    @contextmanager
    def of_step(self, stage: int) -> Iterator[None]:
        """Draw the seed of a step, and restore the global generators at its end."""
        self._base = int(torch.randint(1 << 62, ()).item())
        cpu, python = torch.get_rng_state(), random.getstate()
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
        legacy = numpy.get_state() if numpy is not None else None
        # modules that draw from these generators get other numbers on each stage and step
        random.seed(self._mixed(0, stage))
        if numpy is not None:
            numpy.seed(self._mixed(1, stage) & 0xFFFFFFFF)
        try:
            yield
        finally:
            torch.set_rng_state(cpu)
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(legacy)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self.device)

    def seed_event(self, micro_batch: int, event: int) -> None:
        """Seed the generators for one event."""
        seed = self._mixed(micro_batch + 2, event)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    def _mixed(self, one: int, other: int) -> int:
        mixed = (self._base ^ (one << 32 | other)) * _ODD & ((1 << 64) - 1)
        return (mixed ^ mixed >> 29) & _BITS
