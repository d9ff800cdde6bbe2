"""Observe checkpoints: what the script saves and loads, and where it restores states."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..record.hooks import taps
from ..record.hooks.taps import LOAD_MODEL, LOAD_OPTIMIZER, LOAD_SCHEDULE
from .facts.events import FileFacts, RestoreFacts
from .facts.models import ModelFacts
from .observation import Observation
from .optimization.models import Models
from .optimization.parameters import clean_name
from .user_lines import user_line

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
            ("model", LOAD_MODEL),
            ("optimizer", LOAD_OPTIMIZER),
            ("schedule", LOAD_SCHEDULE),
        ):
            note = functools.partial(self._note, what)
            tap.wrap(self._observation.outermost(_RESTORES, before=note))

    def _note(self, what: str, *_: Any, **__: Any) -> None:
        facts = self._observation.facts
        if len(facts.restores) < MAX_RESTORES:
            facts.restores.append(RestoreFacts(what, user_line(), self._observation.step))


_HOOK = "the checkpoints"
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
            tap.wrap(self._observation.outermost(_HOOK, after=functools.partial(self._end, tap)))

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
