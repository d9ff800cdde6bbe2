"""Observe what a rank sends and writes: collectives, text, and scalars that it logs."""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..record.hooks.taps import Function, Tap, on_import, replace
from .facts.events import CollectiveFacts, MetricFacts, OutputFacts
from .facts.samples import Phase
from .observation import Observation
from .user_lines import is_called_by, user_line

# Collectives


_COLLECTIVES = "the collectives"
_REMOVES_REPEATED = ("/accelerate/accelerator.py", "gather_for_metrics")
MAX_COLLECTIVES = 1 << 14


class Collectives:
    """The collectives of this process, observed at its process groups.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Patch the methods of the recorder's process group."""
        on_import("torch.distributed.distributed_c10d", self._patch)

    def _patch(self, module: Any) -> None:
        from ..record.hooks.collectives import METHODS, RecordedGroup

        for name in METHODS:
            if name in vars(RecordedGroup):
                replace(RecordedGroup, name, functools.partial(self._observed, name))

    def _observed(self, name: str, method: Function) -> Function:
        note = self._observation.guarded(_COLLECTIVES, self._note)

        def call(group: Any, *args: Any, **options: Any) -> Any:
            # A recorder without a file measures the cost of recording.
            if not self._observation.is_over and group._recorder.path is not None:
                note(name, *args[:1])
            return method(group, *args, **options)

        return call

    def _note(self, name: str, tensors: Any = None) -> None:
        facts = self._observation.facts.collectives
        if len(facts) >= MAX_COLLECTIVES:
            self._observation.add_unseen(f"collectives after the first {MAX_COLLECTIVES}")
            return
        in_backward = torch._C._current_graph_task_id() != -1
        facts.append(
            CollectiveFacts(
                kind=name.replace("_", "").removesuffix("base").removesuffix("coalesced"),
                nbytes=sum(one.nbytes for one in _tensors(tensors) if not one.is_sparse),
                phase=self._observation.phase,
                step=self._observation.step,
                is_in_backward=in_backward,
                line="" if in_backward else user_line(),
                removes_repeated=not in_backward and is_called_by(*_REMOVES_REPEATED),
            )
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


# Metrics


_METRICS = "logged metrics"
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
        self._guarded = self._observation.guarded(_METRICS, self._note)
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


_HOOK = "the output"
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
MAX_LINES = 4096
MAX_CHARS = 500  # of a line


class Outputs:
    """The standard output and error of this process, and its TensorBoard writers.

    Args:
        observation: Receives the lines.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._parts = {"stdout": "", "stderr": ""}

    def install(self) -> None:
        """Replace ``write`` of both streams, which ``print`` and handlers of ``logging`` call."""
        for name in self._parts:
            stream: Any = getattr(sys, name)
            if stream is not None:
                stream.write = self._observed(name, stream.write)
        note = self._observation.observed(_HOOK, self._note_scalar)
        for module in _WRITERS:
            Tap(module, "SummaryWriter.add_scalar").before(note)

    def _note_scalar(self, _: Any, tag: Any, scalar_value: Any, *__: Any, **___: Any) -> None:
        self._add([f"{tag}: {float(scalar_value):.6e}"])

    def _observed(self, name: str, write: Callable[[str], Any]) -> Callable[[str], Any]:
        note = self._observation.guarded(_HOOK, self._note)

        @functools.wraps(write)
        def observed(text: str) -> Any:
            written = write(text)
            if self._observation.is_observed:
                note(name, text)
            return written

        return observed

    def _note(self, name: str, text: str) -> None:
        lines = (self._parts[name] + text.replace("\r", "\n")).split("\n")
        self._parts[name] = lines.pop()[-MAX_CHARS:]
        lines = [one for one in lines if one.strip()]
        if lines:
            self._add(lines)

    def _add(self, lines: list[str]) -> None:
        observation, line = self._observation, user_line()
        facts = observation.facts
        for one in lines[: MAX_LINES - len(facts.outputs)]:
            facts.outputs.append(
                OutputFacts(
                    text=one[:MAX_CHARS],
                    line=line,
                    phase=observation.phase,
                    step=observation.step,
                    collectives=len(facts.collectives),
                    batches=len(facts.batches),
                )
            )
