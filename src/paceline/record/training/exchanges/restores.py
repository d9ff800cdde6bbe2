"""Observe where the script restores states of models, optimizers and schedules."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..facts.events import RestoreFacts
from ..observation import Observation
from ..optimization.steps import Steps
from ..user_lines import user_line

_HOOK = "the restored states"
MAX_RESTORES = 64


class Restores:
    """The states that this process restores.

    Args:
        observation: Receives the facts.
        steps: Know the optimizers.
    """

    def __init__(self, observation: Observation, steps: Steps) -> None:
        self._observation, self._steps = observation, steps
        self._is_inside = False

    def install(self) -> None:
        """Patch ``load_state_dict``."""
        kinds: dict[str, Any] = {
            "model": nn.Module,
            "optimizer": Optimizer,
            "schedule": LRScheduler,
        }
        for what, kind in kinds.items():
            kind.load_state_dict = self._observed(kind.__dict__["load_state_dict"], what)

    def _observed(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        note = self._observation.guarded(_HOOK, self._note)

        @functools.wraps(function)
        def load_state_dict(*args: Any, **options: Any) -> Any:
            if self._is_inside or not self._observation.is_observed:
                return function(*args, **options)
            note(args[0] if args else options.get("self"), what)  # torch passes self by keyword
            self._is_inside = True
            try:
                return function(*args, **options)
            finally:
                self._is_inside = False

        return load_state_dict

    def _note(self, owner: Any, what: str) -> None:
        facts = self._observation.facts
        known = self._steps.optimizers.get(owner) if isinstance(owner, Optimizer) else None
        if len(facts.restores) < MAX_RESTORES:
            key = known.key if known is not None else -1
            facts.restores.append(RestoreFacts(what, key, user_line(), self._observation.step))
