"""Observe the metrics that a LightningModule logs with ``self.log``."""

import inspect
import math
from typing import Any

import torch

from ...hooks.taps import Function, Tap
from ..facts.events import MetricFacts
from ..facts.samples import Phase
from ..observation import Observation
from ..user_lines import user_line

_HOOK = "logged metrics"
_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
MAX_METRICS = 2048


class LoggedMetrics:
    """The metrics of this process.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to Lightning's ``log``."""
        self._guarded = self._observation.guarded(_HOOK, self._note)
        for module in _MODULES:
            Tap(module, "LightningModule.log").around(self._log)

    def _log(self, log: Function, *args: Any, **options: Any) -> Any:
        if self._observation.is_observed:
            self._guarded(inspect.signature(log), args, options)
        return log(*args, **options)

    def _note(self, signature: inspect.Signature, args: Any, options: Any) -> None:
        metrics = self._observation.facts.metrics
        if len(metrics) == MAX_METRICS:
            return
        given = signature.bind(*args, **options).arguments
        value = given["value"]
        combines = hasattr(value, "compute") and hasattr(value, "update")  # of torchmetrics
        number = math.nan if combines else float(value)
        is_reduced = combines or bool(given.get("sync_dist"))
        # The phase of the observation changes only with the backward that follows.
        phase = Phase.TRAINING if torch.is_grad_enabled() else Phase.EVALUATION
        metrics.append(MetricFacts(str(given["name"]), number, is_reduced, user_line(), phase))
