"""Observe where the script seeds random number generators."""

import functools
import random
from collections.abc import Callable
from typing import Any

import torch

from ...hooks.import_hooks import after_import
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
        """Patch the functions."""
        seed = self._observed(torch.manual_seed, "torch")
        torch.manual_seed = seed
        torch.random.manual_seed = seed
        random.seed = self._observed(random.seed, "python")
        after_import({"numpy.random": self._patch_numpy})

    def _patch_numpy(self, module: Any) -> None:
        module.seed = self._observed(module.seed, "numpy")
        module.default_rng = self._observed(module.default_rng, "own")

    def _observed(self, function: Callable[..., Any], generator: str) -> Any:
        note = self._observation.guarded(_HOOK, self._note)

        @functools.wraps(function)
        def seeded(*args: Any, **options: Any) -> Any:
            if self._observation.is_observed:
                note(generator, next(iter([*args, *options.values()]), None))
            return function(*args, **options)

        seeded._torchdynamo_inline = function  # type: ignore[attr-defined]
        return seeded

    def _note(self, generator: str, value: Any) -> None:
        line, facts = user_line(), self._observation.facts
        number = int(value) if hasattr(value, "__int__") and not isinstance(value, str) else None
        if line and number is not None and len(facts.seeds) < MAX_SEEDS:
            facts.seeds.append(SeedFacts(generator, number, line, self._observation.step))
