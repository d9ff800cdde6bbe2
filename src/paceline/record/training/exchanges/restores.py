"""Observe where the script restores states of models, optimizers and schedules."""

from typing import Any

from torch.optim import Optimizer

from ...hooks.taps import LOAD_MODEL, LOAD_OPTIMIZER, LOAD_SCHEDULE, Function
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

    def install(self) -> None:
        """Subscribe to ``load_state_dict``."""
        for what, tap in (
            ("model", LOAD_MODEL),
            ("optimizer", LOAD_OPTIMIZER),
            ("schedule", LOAD_SCHEDULE),
        ):
            tap.wrap(self._observation.outermost(_HOOK, before=self._noting(what)))

    def _noting(self, what: str) -> Function:
        def note(*args: Any, **options: Any) -> None:
            self._note(args[0] if args else options.get("self"), what)  # torch passes it by keyword

        return note

    def _note(self, owner: Any, what: str) -> None:
        facts = self._observation.facts
        known = self._steps.optimizers.get(owner) if isinstance(owner, Optimizer) else None
        if len(facts.restores) < MAX_RESTORES:
            key = known.key if known is not None else -1
            facts.restores.append(RestoreFacts(what, key, user_line(), self._observation.step))
