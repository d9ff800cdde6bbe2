"""Find averaged copies of the trained parameters (EMA) in the script's variables.

Such a copy is a module with the names of a trained model's parameters, or a mapping or list of
tensors with their shapes. It is found by looking at the variables of the script's functions that
run, at its global variables, and at attributes of objects in them.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..facts.models import AVERAGE, StateFacts
from ..observation import Observation
from ..optimization.model_names import clean_name, named_parameters
from ..optimization.models import Model, Models
from ..user_lines import is_users_file, user_line

MAX_OBJECTS = 2000  # that are looked at
MIN_PARAMETERS = 2
MAX_WATCHED = 3  # tensors of a copy whose changes are looked at


class Averages:
    """The averaged copies of this process's models.

    Args:
        observation: Receives the facts.
        models: Know the trained models.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self.lines: dict[str, list[str]] = {}  # that change a copy, by name
        self._watched: dict[str, Any] = {}  # copies by name

    def note(self) -> None:
        """Add the values of all copies that are found now."""
        for name, _, model, tensors in self._found():
            self._add(name, model, tensors)

    def watch(self) -> None:
        """Find the copies whose changes are looked at; later calls do nothing."""
        if not self._watched:
            self._watched = {name: value for name, value, _, _ in self._found()}

    def watched(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield some tensors of each copy that is looked at."""
        for name, value in self._watched.items():
            if isinstance(value, nn.Module):
                tensors: Iterable[Any] = value.parameters()
            else:
                tensors = value.values() if isinstance(value, Mapping) else value
            yield name, [one for one in tensors if isinstance(one, torch.Tensor)][:MAX_WATCHED]

    def _found(self) -> Iterator[tuple[str, Any, Model, dict[str, torch.Tensor]]]:
        """Yield name, value, model and tensors of each copy."""
        trained = [one for one in self._models.models if one.has_trained and _is_trained(one)]
        seen: set[int] = {id(one.module()) for one in trained}
        for name, value, _ in users_variables():
            if id(value) in seen or value is None:
                continue
            seen.add(id(value))
            for model in trained:
                tensors = _copies(value, model)
                if tensors:
                    yield name, value, model, tensors
                    break

    def _add(self, name: str, model: Model, tensors: dict[str, torch.Tensor]) -> None:
        rows = {}
        for parameter, tensor in tensors.items():
            row = self._models.add_row(tensor)
            if row is not None:
                rows[f"{model.facts.key}/{parameter}"] = row
        state = StateFacts(AVERAGE, name, user_line(), self._observation.step, rows=rows)
        state.changed_by = list(self.lines.get(name, []))
        self._observation.facts.states.append(state)


def _is_trained(model: Model) -> bool:
    """Return whether a model has parameters to train: a teacher is called in training, too."""
    root = model.module()
    return root is not None and any(one.requires_grad for one in root.parameters())


def users_variables() -> Iterator[tuple[str, Any, Any]]:
    """Yield name and value of the script's variables, and of the attributes of its objects.

    The third value is the object; None for a variable.
    """
    scopes: list[Mapping[str, Any]] = []
    frame = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            scopes.append(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    main = sys.modules.get("__main__")
    scopes.append(vars(main) if main is not None else {})
    count = 0
    for scope in scopes:
        for name, value in list(scope.items()):
            if name.startswith("__"):
                continue
            yield name, value, None
            if not _is_users_object(value):
                continue
            for inner, other in list(vars(value).items()):
                count += 1
                if count > MAX_OBJECTS:
                    return
                yield f"{name}.{inner}", other, value


def _is_users_object(value: Any) -> bool:
    """Return whether a value is an instance of a class of the script, and no module."""
    if isinstance(value, type | nn.Module) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return type(value).__module__ == "__main__" or (
        file is not None and is_users_file(os.path.abspath(file))
    )


def _copies(value: Any, model: Model) -> dict[str, torch.Tensor]:
    """Return the tensors of a copy of the model's parameters by name; {} if it is none."""
    root = model.module()
    if root is None:
        return {}
    own = dict(named_parameters(root))
    if isinstance(value, nn.Module):
        if isinstance(value, nn.parallel.DistributedDataParallel) or not own:
            return {}
        found = dict(named_parameters(value))
        if len(found) == len(own):
            found = {n.removeprefix("module."): one for n, one in found.items()}
        if any(one is other for one in found.values() for other in own.values()):
            return {}
    elif isinstance(value, Mapping):
        found = {
            clean_name(n.removeprefix("module.")): one
            for n, one in value.items()
            if isinstance(n, str) and isinstance(one, torch.Tensor)
        }
    elif isinstance(value, list | tuple) and len(value) == len(own) >= MIN_PARAMETERS:
        tensors = [one for one in value if isinstance(one, torch.Tensor)]
        found = dict(zip(own, tensors, strict=False)) if len(tensors) == len(own) else {}
    else:
        return {}
    common = {n: one for n, one in found.items() if n in own and one.shape == own[n].shape}
    if len(common) < max(MIN_PARAMETERS, len(own) // 2):
        return {}
    storages = {parameter.data_ptr() for parameter in own.values()}
    if any(one.data_ptr() in storages for one in common.values()):
        return {}  # the parameters themselves
    if any(one.requires_grad and one.grad is not None for one in common.values()):
        return {}
    return common
