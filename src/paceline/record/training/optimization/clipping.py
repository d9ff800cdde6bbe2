"""Observe the calls that clip gradients."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from ...hooks.taps import Function
from ..facts.steps import ClipFacts
from ..observation import Observation
from ..user_lines import user_line
from .models import Models

_HOOK = "the clipping of gradients"


class Clipping:
    """The calls of ``clip_grad_norm_`` and ``clip_grad_value_`` since the last step.

    Args:
        observation: Receives the rows of gradients.
        models: Know the names of parameters.

    Attributes:
        skips: Whether the gradients of these parameters are not complete in a replay, and so not
            to be clipped.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self._clips: list[ClipFacts] = []
        self.skips: Callable[[list[torch.Tensor]], bool] = lambda parameters: False

    def take(self) -> list[ClipFacts]:
        """Return the calls since the last step, and forget them."""
        found, self._clips = self._clips, []
        return found

    def clip(self, function: Function, *args: Any, **options: Any) -> Any:
        """Call a function that clips gradients, and note them before and afterwards."""
        observation = self._observation
        if not observation.is_observed:
            return function(*args, **options)
        signature = inspect.signature(function)
        parameters_name, limit_name = list(signature.parameters)[:2]
        call = signature.bind(*args, **options)
        given, limit = call.arguments[parameters_name], call.arguments[limit_name]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        call.arguments[parameters_name] = listed
        if observation.guarded(_HOOK, self.skips)(listed):
            call.arguments[limit_name] = math.inf
            return function(*call.args, **call.kwargs)
        note = observation.guarded(_HOOK, self._rows)
        before = note(listed)
        norm = function(*call.args, **call.kwargs)
        observation.guarded(_HOOK, self._note)(before, note(listed), limit, norm)
        return norm

    def _rows(self, parameters: list[torch.Tensor]) -> dict[str, int]:
        rows = {}
        for parameter in parameters:
            name = self._models.name_of(parameter)
            if name is not None and parameter.grad is not None:
                row = self._models.add_row(parameter.grad)
                if row is not None:
                    rows[name] = row
        return rows

    def _note(
        self, before: dict[str, int] | None, after: dict[str, int] | None, limit: Any, norm: Any
    ) -> None:
        # The norm of sharded gradients is a DTensor, whose value needs a collective.
        value = float(norm) if norm is not None and not hasattr(norm, "placements") else None
        self._clips.append(ClipFacts(user_line(), float(limit), value, before or {}, after or {}))
