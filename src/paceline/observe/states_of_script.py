"""Observe states besides models and optimizers, and find the lines that change states.

Such states are averaged copies of a model, running statistics, tensors of objects, learning-rate
schedulers and gradient scalers.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset
from torch.utils.weak import WeakIdKeyDictionary

from ..record.hooks.taps import SCALER, UPDATE_SCALE, replace
from .facts.models import AVERAGE
from .facts.steps import ScheduleFacts
from .observation import Observation
from .optimization.models import Model, Models
from .optimization.parameters import clean_name, named_parameters
from .optimization.steps import Steps
from .tracers import LineTracer
from .user_lines import is_users_file, user_line, users_frames

# Running statistics of models that are evaluated and not trained (averaged copies).


KIND = "statistics"  # of StateFacts
_NORMS = nn.modules.batchnorm._BatchNorm


class Norms:
    """The batch normalization of models that are evaluated only.

    Args:
        observation: Receives the facts.
        models: Make rows of tensors.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self._lines: dict[int, list[str]] = {}  # that compute statistics, by key of the model
        self._noted: set[tuple[int, int]] = set()  # key of the model, steps before

    def before_forward(self, model: Model, is_training: bool) -> None:
        """Add the running statistics before the first forward of an evaluation."""
        module, key = model.module(), model.facts.key
        if is_training or model.has_trained or module is None:
            return
        if module.training:
            self._lines[key] = [user_line()]
            return
        now = (key, self._observation.step)
        if now in self._noted:
            return
        self._noted.add(now)
        rows = self._models.add_rows(
            (f"{key}/{clean_name(f'{name}.{kind}')}", values)
            for name, norm in module.named_modules()
            if isinstance(norm, _NORMS)
            for kind in ("running_mean", "running_var")
            if (values := getattr(norm, kind)) is not None
        )
        if rows:
            changed_by = self._lines.get(key, ())
            name = model.facts.class_name
            self._observation.add_state(KIND, name, user_line(), changed_by, rows=rows)


# Find averaged copies of the trained parameters (EMA) in the script's variables.
#
# Such a copy is a module with the names of a trained model's parameters, or a mapping or list of
# tensors with their shapes. It is found by looking at the variables of the script's functions that
# run, at its global variables, and at attributes of objects in them.


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
            key = model.facts.key
            rows = self._models.add_rows((f"{key}/{at}", values) for at, values in tensors.items())
            lines = self.lines.get(name, ())
            self._observation.add_state(AVERAGE, name, user_line(), lines, rows=rows)

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


def _is_trained(model: Model) -> bool:
    """Return whether a model has parameters to train: a teacher is called in training, too."""
    root = model.module()
    return root is not None and any(one.requires_grad for one in root.parameters())


def users_variables() -> Iterator[tuple[str, Any, Any]]:
    """Yield name and value of the script's variables, and of the attributes of its objects.

    The third value is the object; None for a variable.
    """
    scopes: list[Mapping[str, Any]] = [frame.f_locals for frame in users_frames()]
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


# Find tensors in the script's objects that may be states of the training: queues, centers, sums.
#
# Models, their averaged copies, datasets and batches are none of these. Modules without parameters
# are: losses that keep a state in buffers.


MIN_ELEMENTS, MAX_STATE_ELEMENTS = 4, 1 << 20
MAX_FOUND_TENSORS = 8


class OwnTensors:
    """The tensors of this script's objects.

    Args:
        observation: Receives the facts.
        models: Make rows of tensors.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self.lines: dict[str, list[str]] = {}  # that change a tensor, by name
        self._watched: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """Add the values of all tensors that are found now."""
        buffers = self._buffers()
        for name, tensor in (self._found() | buffers).items():
            if rows := self._models.add_rows([(name, tensor)]):
                kind, lines = "buffer" if name in buffers else "tensor", self.lines.get(name, ())
                self._observation.add_state(kind, name, user_line(), lines, rows=rows)

    def watch(self) -> None:
        """Find the tensors whose changes are looked at; later calls do nothing."""
        if not self._watched:
            self._watched = self._found() | self._buffers()

    def watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are looked at."""
        yield from self._watched.items()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the script's modules that have no parameters."""
        found: dict[str, torch.Tensor] = {}
        for name, value, _ in users_variables():
            if not isinstance(value, nn.Module) or any(True for _ in value.parameters()):
                continue
            for inner, buffer in value.named_buffers():
                if _is_state(buffer) and len(found) < MAX_FOUND_TENSORS:
                    found.setdefault(f"{name}.{inner}", buffer)
        return found

    def _found(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value, owner in users_variables():
            if owner is None or isinstance(owner, Dataset) or not isinstance(value, torch.Tensor):
                continue
            if type(owner) in self._observation.batch_types:
                continue
            if _is_state(value):
                found.setdefault(name, value)
            if len(found) == MAX_FOUND_TENSORS:
                break
        return found


def _is_state(tensor: torch.Tensor) -> bool:
    is_constant = not tensor.is_floating_point() or tensor.requires_grad
    return not is_constant and MIN_ELEMENTS <= tensor.numel() <= MAX_STATE_ELEMENTS


_HOOK = "the lines that change gradients"
MAX_EVENTS = 4000  # lines that are looked at, in all steps
MAX_EVENTS_PER_STEP = 400
MAX_TENSORS = 6  # of an optimizer
MAX_ELEMENTS = 1 << 15  # of a tensor, evenly spaced


class ChangeLines:
    """Looks after each line between a backward and the next forward, in the first steps.

    Args:
        observation: Receives the lines.
        steps: Know the optimizers.
        averages, tensors: Know the averaged copies, and tensors of the script.
    """

    def __init__(
        self, observation: Observation, steps: Steps, averages: Averages, tensors: OwnTensors
    ) -> None:
        self._observation, self._steps = observation, steps
        self._averages, self._tensors = averages, tensors
        self._gradients = LineTracer(self._gradient_states, self._add, MAX_EVENTS_PER_STEP)
        self._values = LineTracer(self._value_states, self._add, MAX_EVENTS_PER_STEP)
        self._left = MAX_EVENTS

    def after_backward(self) -> None:
        """Begin to look at the gradients."""
        if self._left > 0 and not self._steps.is_stepping:
            self._gradients.start()

    def after_step(self) -> None:
        """Begin to look at parameters and averaged copies."""
        if self._left > 0:
            self._averages.watch()
            self._tensors.watch()
            self._values.start()

    def after_batch(self) -> None:
        """Go on after a batch was read."""
        if self._left > 0 and self._observation.step:
            self._values.start()

    def stop(self, *_: Any) -> None:
        """End to look: something else begins."""
        for tracer in (self._gradients, self._values):
            if tracer.is_running:
                tracer.stop()
                self._left -= tracer.events

    def _add(self, name: str, line: str, site: str) -> None:
        kind, _, rest = name.partition(" ")
        if kind in ("average", "tensor"):
            known = (self._averages if kind == "average" else self._tensors).lines
            known.setdefault(rest, list(dict.fromkeys([site, line])))
            return
        lines = self._observation.change_lines.get(kind)
        if lines is None:  # of a learning rate
            lines = list(self._steps.optimizers.values())[int(rest)].rate_lines
        if line not in lines:
            lines.append(line)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, optimizer in enumerate(list(self._steps.optimizers)):
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            every = max(-(-len(parameters) // MAX_TENSORS), 1)
            for at, parameter in enumerate(parameters[::every]):
                yield f"{key}.{at}", parameter

    def _gradient_states(self) -> dict[str, Any]:
        found = {}
        for name, parameter in self._parameters():
            state = fingerprint(parameter.grad)
            if state is not None and state[1]:  # gradients that are set to zero are not changed
                found[f"gradient {name}"] = state
        return found

    def _value_states(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"parameter {name}": fingerprint(one) for name, one in self._parameters()
        }
        for key, optimizer in enumerate(list(self._steps.optimizers)):
            found[f"rate {key}"] = [group.get("lr") for group in optimizer.param_groups]
        found |= {f"tensor {name}": fingerprint(one) for name, one in self._tensors.watched()}
        found |= {f"average {n}": list(map(fingerprint, t)) for n, t in self._averages.watched()}
        return found


def fingerprint(tensor: Any) -> tuple[float, float] | None:
    """Return two numbers that change with the values of a tensor, or of this rank's shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or local.is_sparse or local.is_meta:
        return None
    with torch.no_grad():
        values = local.detach()
        while not values.is_contiguous() and values.ndim:
            values = values[0]
        values = values.reshape(-1)[:: max(values.numel() // MAX_ELEMENTS, 1)].float()
        return float(values.sum()), float(values.abs().sum())


# Learning-rate schedulers and gradient scalers


_SCHEDULES = "the schedules"
# Attributes of schedulers that count steps or epochs.
_LENGTHS = (
    *("T_max", "total_steps", "step_size", "milestones", "T_0", "T_mult", "total_iters"),
    *("step_size_up", "step_size_down", "_milestones", "patience", "num_warmup_steps"),
)
_VALUES = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")
MAX_STEPS = 512  # calls of a scheduler's step that are listed


class Schedules:
    """The learning-rate schedulers and gradient scalers of this process.

    Args:
        observation: Receives the facts.
        steps: Know the optimizers.
    """

    def __init__(self, observation: Observation, steps: Steps) -> None:
        self._observation, self._steps = observation, steps
        self._schedules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._lines: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of scalers

    def install(self) -> None:
        """Subscribe to the schedulers of torch, and the gradient scaler."""
        base: Any = lr_scheduler.LRScheduler
        made = self._observation.outermost(_SCHEDULES, after=self._note_schedule)
        stepped = self._observation.outermost(_SCHEDULES, after=self._note_step)
        for kind in [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]:
            if issubclass(kind, base):
                if kind is base or ("__init__" in vars(kind) and not _calls_base(kind)):
                    replace(kind, "__init__", made)
                if "step" in vars(kind):
                    replace(kind, "step", stepped)
        SCALER.after(self._observation.guarded(_SCHEDULES, self._note_scaler))
        UPDATE_SCALE.after(self._observation.observed(_SCHEDULES, self._note_update))

    def _note_schedule(self, _: None, schedule: Any, *__: Any, **___: Any) -> None:
        if schedule in self._schedules:
            return
        optimizer = self._steps.optimizers.get(getattr(schedule, "optimizer", None) or schedule)
        facts = ScheduleFacts(
            class_name=type(schedule).__name__,
            line=user_line(),
            optimizer=optimizer.key if optimizer is not None else -1,
            lengths={},
        )
        self._schedules[schedule] = facts
        self._observation.facts.schedules.append(facts)

    def _note_step(self, _: Any, schedule: Any, *__: Any, **___: Any) -> None:
        facts = self._schedules.get(schedule)
        if facts is None:
            return
        facts.lengths = facts.lengths or _lengths(schedule)
        line = user_line()
        if line not in facts.step_lines:
            facts.step_lines.append(line)
        if len(facts.steps) < MAX_STEPS:
            facts.steps.append(self._observation.step)
        if hasattr(schedule, "num_bad_epochs"):
            numbers = {name: vars(schedule).get(name) for name in _VALUES}
            values = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}
            place = (facts.class_name, facts.line, [line])
            self._observation.add_state("schedule", *place, values=values)

    def complete(self) -> None:
        """Add the lengths of schedulers that were never stepped, and the largest learning rates."""
        for schedule, facts in list(self._schedules.items()):
            facts.lengths = facts.lengths or _lengths(schedule)
            groups = schedule.optimizer.param_groups
            if all("max_lr" in group for group in groups):
                facts.peaks = [float(group["max_lr"]) for group in groups]

    # Gradient scalers

    def _note_scaler(self, _: None, scaler: Any, *__: Any, **___: Any) -> None:
        self._lines[scaler] = user_line()
        self._add_scaler(scaler)

    def _note_update(self, _: None, scaler: Any, *__: Any, **___: Any) -> None:
        self._add_scaler(scaler, user_line())

    def _add_scaler(self, scaler: Any, *changed_by: str) -> None:
        if scaler.is_enabled():
            values = {"scale": float(scaler.get_scale())}
            tracker: Any = getattr(scaler, "_growth_tracker", None)
            values["growth_tracker"] = float(tracker) if tracker is not None else 0.0
            line = self._lines.get(scaler, "")
            place = (type(scaler).__name__, line, changed_by)
            self._observation.add_state("scaler", *place, values=values)


def _calls_base(kind: Any) -> bool:
    """Return whether the constructor calls that of ``LRScheduler``."""
    return "__class__" in kind.__init__.__code__.co_freevars


def _lengths(schedule: Any) -> dict[str, list[int]]:
    """Return the numbers of steps or epochs that a scheduler was made with."""
    found: dict[str, list[int]] = {}
    for name in _LENGTHS:
        value = vars(schedule).get(name)
        values = [value] if isinstance(value, int) else value
        if isinstance(values, dict | list | tuple) and all(isinstance(x, int) for x in values):
            found[name.strip("_")] = [int(length) for length in values]
    return found
