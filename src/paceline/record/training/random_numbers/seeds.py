"""Observe where the script seeds random number generators."""

import functools
from typing import Any

import torch

from ...hooks.taps import Tap
from ..facts.events import SeedFacts
from ..observation import Observation
from ..user_lines import user_line

_HOOK = "the seeds"
MAX_SEEDS = 256


class Seeds:
    """The calls that seed global generators, or make a seeded one of NumPy.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to the functions."""
        functions = [
            ("torch.random", "manual_seed", "torch"),
            ("random", "seed", "python"),
            ("numpy.random", "seed", "numpy"),
            ("numpy.random", "default_rng", "own"),
        ]
        if torch.manual_seed is not torch.random.manual_seed:  # torch._dynamo has wrapped one
            functions.append(("torch", "manual_seed", "torch"))
        for module, name, generator in functions:
            note = functools.partial(self._note, generator)
            tap = Tap(module, name, is_traced=True)
            tap.before(self._observation.observed(_HOOK, note))

    def _note(self, generator: str, *args: Any, **options: Any) -> None:
        value: Any = next(iter([*args, *options.values()]), None)
        line, facts = user_line(), self._observation.facts
        number = int(value) if hasattr(value, "__int__") and not isinstance(value, str) else None
        if line and number is not None and len(facts.seeds) < MAX_SEEDS:
            facts.seeds.append(SeedFacts(generator, number, line, self._observation.step))
