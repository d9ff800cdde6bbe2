"""Observe what a rank sends, writes, saves and restores: collectives, text, checkpoints."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..record.hooks import taps
from ..record.hooks.taps import Function, Tap, on_import, replace
from .facts.events import CollectiveFacts, FileFacts, MetricFacts, OutputFacts, RestoreFacts
from .facts.models import ModelFacts
from .facts.samples import Phase
from .observation import Observation
from .optimization.models import Models
from .optimization.parameters import clean_name
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


# Restored states


_RESTORES = "the restored states"
MAX_RESTORES = 64


class Restores:
    """The states that this process restores.

    Args:
        observation: Receives the facts.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to ``load_state_dict``."""
        for what, tap in (
            ("model", taps.LOAD_MODEL),
            ("optimizer", taps.LOAD_OPTIMIZER),
            ("schedule", taps.LOAD_SCHEDULE),
        ):
            tap.wrap(self._observation.outermost(_RESTORES, before=self._noting(what)))

    def _noting(self, what: str) -> Function:
        return lambda *_, **__: self._note(what)  # torch passes the owner as "self"

    def _note(self, what: str) -> None:
        facts = self._observation.facts
        if len(facts.restores) < MAX_RESTORES:
            facts.restores.append(RestoreFacts(what, user_line(), self._observation.step))


_CHECKPOINTS = "the checkpoints"
MAX_FILES = 64
MAX_KEYS = 200
MAX_DEPTH = 4
_RANDOM = ("rng", "random")  # parts of keys of generators' states
_SAVES = (taps.SAVE, taps.SAVE_TENSORS, taps.SHARED_SAVE, taps.SHARED_ASYNC_SAVE)
_LOADS = (taps.LOAD, taps.LOAD_TENSORS, taps.SHARED_LOAD)
_SHARED = (taps.SHARED_SAVE, taps.SHARED_ASYNC_SAVE, taps.SHARED_LOAD)  # by all ranks together


class Files:
    """The checkpoints of this process.

    Args:
        observation: Receives the facts.
        models: Know the names of parameters.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        # Rows by name of states that were loaded before any model was known.
        self._unresolved: list[tuple[FileFacts, dict[str, int]]] = []

    def install(self) -> None:
        """Subscribe to the functions that save and load."""
        self._observation.before_end.append(self._resolve)
        for tap in (*_SAVES, *_LOADS):
            tap.wrap(
                self._observation.outermost(_CHECKPOINTS, after=functools.partial(self._end, tap))
            )

    def _end(self, tap: taps.Tap, result: Any, *args: Any, **options: Any) -> None:
        """Note a call of a tap that has ended."""
        is_save, is_shared = tap in _SAVES, tap in _SHARED
        if is_save or is_shared:
            path = _argument(args, options, 1, ("f", "filename", "checkpoint_id"))
            content = _argument(args, options, 0, ("obj", "tensors", "state_dict"))
        else:
            path, content = _argument(args, options, 0, ("f", "filename")), result
        self._note(content, path, is_save, is_shared)

    def _note(self, content: Any, path: Any, is_save: bool, is_shared: bool) -> None:
        facts = self._observation.facts
        if len(facts.files) >= MAX_FILES:
            self._observation.add_unseen(f"checkpoints after the first {MAX_FILES}")
            return
        text = getattr(path, "name", path)
        file = FileFacts(
            path=str(text) if isinstance(text, str) or hasattr(text, "__fspath__") else "",
            is_save=is_save,
            line=user_line(),
            step=self._observation.step,
            keys=_keys(content),
            contains=[],
            is_distributed=is_shared,
        )
        found: set[str] = set()
        self._look(content, file, found, 0)
        file.contains = sorted(found)
        facts.files.append(file)

    def _look(self, value: Any, file: FileFacts, found: set[str], depth: int) -> None:
        """Add what a part of a checkpoint contains."""
        if depth > MAX_DEPTH:
            return
        if isinstance(value, torch.nn.Module):
            value = value.state_dict()
        if isinstance(value, list | tuple):
            for one in value[:8]:
                self._look(one, file, found, depth + 1)
        if not isinstance(value, Mapping):
            return
        tensors = _tensors_of(value)
        rows = self._model_rows(tensors)
        if not rows and tensors and not self._models.models:
            self._unresolved.append((file, self._models.add_rows(tensors.items())))
        if rows:
            found.add("model")
            if not file.rows:
                file.rows = rows
            return
        kind = _kind_of(value)
        if kind:
            found.add(kind)
            return
        for key, one in value.items():
            if isinstance(key, str) and any(part in key.lower() for part in _RANDOM):
                found.add("random")
            self._look(one, file, found, depth + 1)

    def _model_rows(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return the rows of a model's parameters by "MODEL KEY/NAME"; {} if it is no model."""
        model = self._model_with(tensors)
        if model is None:
            return {}
        names = [one.name for one in model.parameters if one.name in tensors]
        rows = self._models.add_rows((name, tensors[name]) for name in names)
        return {f"{model.key}/{name}": row for name, row in rows.items()}

    def _model_with(self, names: Mapping[str, Any]) -> ModelFacts | None:
        """Return the model at least half of whose parameters have these names."""
        for model in self._observation.facts.models:
            common = sum(one.name in names for one in model.parameters)
            if common and 2 * common >= len(model.parameters):
                return model
        return None

    def _resolve(self) -> None:
        """Assign the states that were loaded before the first forward to the models."""
        for file, rows in self._unresolved:
            model = self._model_with(rows)
            if model is None or file.rows:
                continue
            names = [one.name for one in model.parameters if one.name in rows]
            file.rows = {f"{model.key}/{name}": rows[name] for name in names}
            file.contains = sorted({*file.contains, "model"})


def _tensors_of(state: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors of a state by name, without prefixes of wrappers."""
    return {
        clean_name(name.removeprefix("module.")): one
        for name, one in state.items()
        if isinstance(name, str) and isinstance(one, torch.Tensor) and one.is_floating_point()
    }


def _argument(args: Any, options: dict[str, Any], at: int, names: tuple[str, ...]) -> Any:
    """Return an argument by its position, or by one of its names."""
    named = next((options[name] for name in names if name in options), None)
    return args[at] if named is None and len(args) > at else named


def _keys(content: Any) -> list[str]:
    """Return the top-level keys, and those one level below with a dot."""
    if not isinstance(content, Mapping):
        return []
    found = []
    for key, value in content.items():
        found.append(str(key))
        if isinstance(value, Mapping) and len(value) < MAX_KEYS:
            found += [f"{key}.{inner}" for inner in value]
    return found[:MAX_KEYS]


def _kind_of(state: Mapping[Any, Any]) -> str:
    """Return which state a mapping is: "optimizer", "schedule", "scaler" or ""."""
    if "param_groups" in state and "state" in state:
        return "optimizer"
    if "last_epoch" in state and ("_step_count" in state or "base_lrs" in state):
        return "schedule"
    if "num_bad_epochs" in state and "best" in state:
        return "schedule"
    if "growth_factor" in state and "scale" in state:
        return "scaler"
    return ""
