"""What a model's forward does, in order: calls of its modules, and operations between them.

The forward runs once on tensors without data, in a copy of the model. Modules that are not divided
(atoms) are one event each; of the others, every function of PyTorch is an event. So control flow
that depends on shapes, modes or attributes works, and one that depends on data is an error.
"""

import contextlib
import copy
import functools
import linecache
import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import module_tracker
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from ...data.sampling.sample_order import preserve_random_states
from ..fake_tensors import READS_VALUES, OneFakeMode
from ..placement import empty_as
from ..strategy.training_step import call
from .atoms import Atoms, tensors_by_name
from .attributes import SIMPLE, Content, contents

# what they do belongs to a tensor of one stage, and is not repeated
_OF_ONE_TENSOR = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.backward,
)
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


_INSIDE = "do it in the forward of a module that is not divided, or layout='data'"


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an event.

    Attributes:
        kind: "value" (made by an event, or an input), "tensor" (a parameter or buffer of the model)
            or "constant" (a tensor that a module holds as a plain attribute).
        key: Number of the value, or name of the tensor.
    """

    kind: str
    key: Any


@dataclass(frozen=True)
class Event:
    """A call of a module or of a function.

    Attributes:
        target: Name of the module, or the function.
        spec, leaves: Arguments and keyword arguments; tensors are ``Ref``.
        results: Of each leaf of the result, the number of its value; None for others than tensors.
        tensors: Names of the parameters and buffers that it uses.
        changes: Names of parameters and buffers that it changes.
        with_grad: Whether gradients were enabled.
        device, autocast: Type of device; whether autocast was enabled for it, and its dtype.
        line: Line of the script or library that calls it.
        flops: Operations of its forward.
    """

    target: str | Callable[..., Any]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    results: tuple[int | None, ...]
    tensors: tuple[str, ...]
    changes: tuple[str, ...]
    with_grad: bool
    device: str
    autocast: tuple[bool, torch.dtype]
    line: str
    flops: int = 0

    @property
    def name(self) -> str:
        """What is called, for messages."""
        if isinstance(self.target, str):
            return self.target or "the model"
        return str(getattr(self.target, "__name__", self.target))

    @property
    def values(self) -> list[int]:
        """The values among its arguments."""
        return [r.key for r in self.leaves if isinstance(r, Ref) and r.kind == "value"]


@dataclass(frozen=True)
class Value:
    """A tensor that an event has made; ``event`` is None for inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    event: int | None


@dataclass(frozen=True)
class Change:
    """Values that an event changes in place: one tensor and its views."""

    event: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """One forward.

    Attributes:
        events: In order.
        values: Inputs first, one for each leaf of the inputs, which may be no tensor.
        changes: In-place operations.
        spec, leaves: The outputs.
    """

    events: tuple[Event, ...]
    values: tuple[Value, ...]
    changes: tuple[Change, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs."""
        numbers = {
            leaf.key for leaf in self.leaves if isinstance(leaf, Ref) and leaf.kind == "value"
        }
        outputs = [self.values[number] for number in numbers]
        return sum(math.prod(output.shape) * output.dtype.itemsize for output in outputs)


class Skeleton:
    """A copy of a whole model without data, whose forward can be traced at any time.

    Attributes:
        atoms: Which modules are events.
        constants: Tensors that modules hold as plain attributes, by name.
        mode: The fake mode of its tensors.
        by_name: Its parameters, buffers and constants.
        kept: Attributes in which the last forward has kept tensors with gradients, and what they
            were before it.
    """

    def __init__(self, model: nn.Module, atoms: Atoms, device: torch.device) -> None:
        self.atoms, self.device = atoms, device
        self.constants = {
            f"{name}.{key}" if name else key: value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self.mode = OneFakeMode(allow_non_fake_inputs=True)
        named = tensors_by_name(model) | self.constants
        with self.mode, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            memo: dict[int, Any] = {id(t): empty_as(t, device) for t in named.values()}
            self._refs = {
                id(memo[id(t)]): Ref("constant" if name in self.constants else "tensor", name)
                for name, t in reversed(named.items())
            }
            self.model: nn.Module = copy.deepcopy(model, memo)
        self.kept: dict[str, Any] = {}
        self._fakes = memo  # keeps the ids valid
        for module in self.model.modules():
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 0.1  # None reads the number of batches, and changes no shape
        self._modules = dict(self.model.named_modules(remove_duplicate=False))
        inside = tuple(f"{name}." for name in atoms.names)
        self._glue = [
            name
            for name in self._modules
            if name not in atoms.names and not name.startswith(inside)
        ]
        self._before = {name: contents(model.get_submodule(name)) for name in self._glue}
        self._originals = [dict(vars(m)) for m in model.modules()]  # keeps the ids valid
        self.by_name = {ref.key: memo[id(named[ref.key])] for ref in self._refs.values()}

    def modes(self, model: nn.Module) -> tuple[Any, ...]:
        """Return what decides, beside its inputs, what the traced forward does.

        That are the modes, attributes and hooks of the modules that are no atoms.
        """
        memo: dict[int, Content] = {}
        return tuple(tuple(contents(model.get_submodule(n), memo).items()) for n in self._glue)

    def trace(self, model: nn.Module, inputs: Any) -> Trace:
        """Trace a forward with the modes of a model.

        Args:
            inputs: As for ``TrainingStep``; shapes and dtypes matter, values do not.

        Raises:
            ValueError: The forward can't be traced; the message has the line.
        """
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules[name].training = module.training
        for name in self._glue:
            try:
                self._follow(name, model.get_submodule(name))
            except _TraceError as error:
                raise ValueError(error.text(type(model).__name__)) from None
        flat, spec = tree_flatten(inputs)
        _check_leaves(flat)
        with preserve_random_states(), self.mode, FlopCounterMode(display=False) as flops:
            fakes = [empty_as(t, self.device) if torch.is_tensor(t) else t for t in flat]
            recording = _Recording(self, self._refs, fakes, flops.get_total_flops)
            before = _states_of_others()
            try:
                with self._unchanged(), self._intercepted(recording), recording:
                    outputs = call(self.model, tree_unflatten(fakes, spec))
                for name, state in _states_of_others().items():
                    if state != before[name]:
                        raise _TraceError(f"draws from {name} outside of a module", "", "")
                return recording.trace(outputs)
            except _TraceError as error:
                raise ValueError(error.text(type(model).__name__)) from None
            except Exception as error:  # of any code of the user's model
                raise ValueError(_explain(error, type(model).__name__)) from error

    def _follow(self, name: str, live: nn.Module) -> None:
        """Give a module of the copy the attributes that a script may have changed."""
        before = self._before[name]
        for key, content in contents(live).items():
            if content.is_plain:
                self._modules[name].__dict__[key] = copy.deepcopy(vars(live)[key])
            elif content != before.get(key):
                full = f"{name}.{key}".removeprefix(".")
                what = f"needs {full} as it was in world.distribute, and it has changed"
                raise _TraceError(what, "", "change it before world.distribute")

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore the attributes of the copy; raise _TraceError for a change that would be lost.

        A tensor that the forward keeps as an attribute is a cache or for inspection: allowed.
        """
        before = [
            (m, dict(vars(m)), dict(m._parameters), dict(m._buffers))
            for m in self._modules.values()
        ]
        contained = {name: contents(self._modules[name]) for name in self._glue}
        try:
            yield
            of_names = dict(zip(self._modules, before, strict=True))
            self.kept = {
                f"{name}.{key}".removeprefix("."): attributes.get(key)
                for name, (module, attributes, *_) in of_names.items()
                for key, value in vars(module).items()
                if torch.is_tensor(value) and value.requires_grad
                if attributes.get(key) is not value
            }
            for name in self._glue:
                module, _, *tensors = of_names[name]
                self._check_unchanged(module, contained[name], *tensors)
        finally:
            for module, attributes, parameters, buffers in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _check_unchanged(
        self, module: nn.Module, before: Any, parameters: Any, buffers: Any
    ) -> None:
        for key, value in {**parameters, **buffers}.items():
            if module._parameters.get(key, module._buffers.get(key)) is not value:
                hint = f"self.{key}.copy_(...), or assign it inside of a module"
                raise _TraceError(f"assigns self.{key}", "", hint)
        for key, content in contents(module).items():
            if content.is_plain and content != before.get(key):
                hint = "change attributes outside of the forward, or inside of a module"
                raise _TraceError(f"changes self.{key}", "", hint)

    @contextlib.contextmanager
    def _intercepted(self, recording: "_Recording") -> Iterator[None]:
        """Let the atoms of the copy tell the recording of their calls."""
        changed = []
        for name in self.atoms.names:
            module = self._modules[name]
            if module.__class__.__dict__.get("is_intercepted"):
                continue  # the same module under another name
            changed.append((module, module.__class__))
            module.__class__ = _intercepting(module.__class__, name, recording)
        apply = torch.autograd.Function.__dict__["apply"]
        torch.autograd.Function.apply = classmethod(  # type: ignore[assignment, method-assign]
            lambda kind, *args, **options: recording.note_function(
                kind, apply.__func__(kind, *args, **options)
            )
        )
        try:
            yield
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
            for module, kind in changed:
                module.__class__ = kind

    def module_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a module of the copy, by name in the model."""
        module = self._modules[name]
        tensors = [*module.parameters(), *module.buffers()]
        return {self._refs[id(t)].key: t for t in tensors}


def _intercepting(kind: type, name: str, recording: "_Recording") -> type:
    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        inner = functools.partial(kind.__call__, self)
        return recording.call_module(name, inner, args, options)

    return type(kind.__name__, (kind,), {"__call__": call, "is_intercepted": True})


class _TraceError(Exception):
    """The model can't be traced: what it does, where, and a hint."""

    def __init__(self, what: str, line: str, hint: str) -> None:
        super().__init__(what)
        self.what, self.line, self.hint = what, line, hint

    def text(self, kind: str) -> str:
        where = f" at {self.line}" if self.line else ""
        hint = self.hint or "move it into a module with parameters, or layout='data'"
        return f"pipeline: the forward of the {kind} {self.what}{where}. HINT: {hint}"


@dataclass(eq=False)
class _Recording(TorchFunctionMode):
    """Notes events while the forward runs."""

    skeleton: Skeleton
    refs: Mapping[int, Ref]
    inputs: list[Any]
    flops: Callable[[], int]
    events: list[Event] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._is_inside = False
        self._numbers: dict[int, int] = {}
        self._tensors: list[Any] = []  # by number; keeps the ids valid
        self._versions: list[int] = []
        self._made_by: list[int | None] = []
        self._of_functions: dict[int, tuple[torch.Tensor, str, str]] = {}
        self._data: list[tuple[torch.Tensor, int]] = []  # of this event: results of .data
        self._replaced: list[torch.Tensor] = []  # of this event: tensors whose .data was assigned
        for leaf in self.inputs:
            self._add(leaf, None)

    def _add(self, tensor: Any, event: int | None) -> int:
        number = len(self._tensors)
        self._tensors.append(tensor)
        self._made_by.append(event)
        is_tensor = torch.is_tensor(tensor)
        self._versions.append(tensor._version if is_tensor else 0)
        if is_tensor:
            self._numbers.setdefault(id(tensor), number)
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self._is_inside:
            return self._inside(func, args, options)
        if _is_of_one_tensor(func) and not _is_of_counter(sys._getframe(1)):
            what = "sets an attribute" if func not in _OF_ONE_TENSOR else f"calls {func.__name__}()"
            line = _line_of(sys._getframe(1))
            raise _TraceError(f"{what} of a tensor outside of a module", line, _INSIDE)
        return self._run(func, func, args, options)

    def _inside(self, func: Any, args: Any, options: Any) -> Any:
        """Run a function of an atom; note ``.data``, whose changes no counter of versions has."""
        if func == _SET_DATA:
            self._replaced.append(args[0])
        out = func(*args, **options)
        if func == _GET_DATA:
            self._data.append((out, out._version))
        return out

    def call_module(self, name: str, call: Any, args: Any, options: Any) -> Any:
        if self._is_inside:
            return call(*args, **options)
        self._is_inside = True
        try:
            with preserve_random_states():  # its own draws are repeated when it runs
                return self._run(name, call, args, options)
        finally:
            self._is_inside = False

    def note_function(self, kind: type, out: Any) -> Any:
        """Note the results of an autograd function: its operations have another gradient."""
        if not self._is_inside and torch.is_grad_enabled():
            line = _line_of(sys._getframe(1))
            for leaf in tree_flatten(out)[0]:
                if torch.is_tensor(leaf) and leaf.requires_grad:
                    self._of_functions[id(leaf)] = leaf, kind.__name__, line
        return out

    def _run(self, target: Any, call: Any, args: Any, options: Any) -> Any:
        line = _line_of(sys._getframe(2))
        leaves, spec = tree_flatten((args, options))
        refs = [self._ref(leaf, line) for leaf in leaves]
        named: dict[str, torch.Tensor] = {}
        if isinstance(target, str):
            named = self.skeleton.module_tensors(target)
        named |= {
            r.key: self.skeleton.by_name[r.key]
            for r in refs
            if isinstance(r, Ref) and r.kind == "tensor"
        }
        buffers = {n: t._version for n, t in named.items()}
        device, before = self.skeleton.device.type, self.flops()
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with_grad = torch.is_grad_enabled()
        self._data, self._replaced = [], []
        out = call(*args, **options)
        results, _ = tree_flatten(out)
        changed = self._changed()
        of_model = {n for n, version in buffers.items() if named[n]._version != version}
        of_model |= self._sharing([self._tensors[n] for n in changed])
        by_data = [tensor for tensor, version in self._data if tensor._version != version]
        of_model |= self._sharing([*by_data, *self._replaced])
        if not changed and not of_model and not any(torch.is_tensor(result) for result in results):
            return out
        number = len(self.events)
        if changed:
            self.changes.append(Change(number, tuple(changed)))
        numbers = [self._result(result, number) for result in results]
        self.events.append(
            Event(
                *(
                    target,
                    spec,
                    tuple(refs),
                    tuple(numbers),
                    (*named, *sorted(of_model - {*named})),
                ),
                tuple(sorted(of_model)),
                *(with_grad, device, autocast, line, self.flops() - before),
            )
        )
        return out

    def _ref(self, leaf: Any, line: str) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        if id(leaf) in self._of_functions:
            _, name, at = self._of_functions[id(leaf)]
            raise _TraceError(
                f"calls the autograd function {name} outside of a module", at, _INSIDE
            )
        known = self.refs.get(id(leaf))
        if known is not None:
            return known
        if id(leaf) in self._numbers:
            return Ref("value", self._numbers[id(leaf)])
        shape = tuple(leaf.shape)
        raise _TraceError(
            f"uses a tensor of shape {shape} that is neither an input nor a parameter or buffer, "
            "and that no function of PyTorch has made in it",
            line,
            "register_buffer, or compute it inside of a module",
        )

    def _result(self, leaf: Any, event: int) -> int | None:
        if not torch.is_tensor(leaf) or id(leaf) in self.refs:
            return None
        if id(leaf) in self._numbers:  # in place, or returned unchanged
            return self._numbers[id(leaf)]
        return self._add(leaf, event)

    def _changed(self) -> list[int]:
        """Return the values that have changed since the last event."""
        found = []
        for number, tensor in enumerate(self._tensors):
            if torch.is_tensor(tensor) and tensor._version != self._versions[number]:
                self._versions[number] = tensor._version
                found.append(number)
        return found

    def _sharing(self, changed: list[Any]) -> set[str]:
        """Return the names of the model's tensors whose memory changed tensors share."""
        storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in changed}
        if not storages:
            return set()
        return {
            name
            for name, tensor in self.skeleton.by_name.items()
            if StorageWeakRef(tensor.untyped_storage()) in storages
        }

    def trace(self, outputs: Any) -> Trace:
        leaves, spec = tree_flatten(outputs)
        refs = tuple(self._ref(leaf, "its return") for leaf in leaves)
        for leaf in leaves:
            if not torch.is_tensor(leaf) and hasattr(leaf, "__dict__"):
                hint = "return tensors, or tuples, lists and dicts of them"
                raise _TraceError(f"returns a {type(leaf).__name__}", "", hint)
        values = [
            Value(tuple(t.shape), t.dtype, t.requires_grad, made)
            if torch.is_tensor(t)
            else Value((), torch.uint8, False, made)
            for t, made in zip(self._tensors, self._made_by, strict=True)
        ]
        return Trace(tuple(self.events), tuple(values), tuple(self.changes), spec, refs)


def _states_of_others() -> dict[str, Any]:
    """Return the states of the generators that are not PyTorch's."""
    numpy = sys.modules.get("numpy")
    states = {"Python's random": repr(random.getstate())}
    if numpy is not None:
        _, words, *rest = numpy.random.get_state()
        states["numpy.random"] = repr((words.tobytes(), *rest))
    return states


_LEAVES = (*SIMPLE, torch.Tensor, torch.dtype, torch.device)


def _check_leaves(leaves: list[Any]) -> None:
    """Raise ValueError for inputs whose values a plan could not follow from batch to batch."""
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            raise ValueError(
                f"pipeline: the inputs contain a {type(leaf).__name__}. HINT: tensors, numbers and "
                "texts, in tuples, lists and dicts, such as dict(batch)"
            )


def _line_of(frame: Any) -> str:
    """Return file, line and code of the first frame outside of PyTorch and Paceline."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return _text_of(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def _is_of_one_tensor(func: Any) -> bool:
    return func in _OF_ONE_TENSOR or getattr(func, "__name__", "") == "__set__"


def _is_of_counter(frame: Any) -> bool:
    """Return whether PyTorch's counter of operations calls, which has hooks of its own."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES[0]):
        if frame.f_code.co_filename == module_tracker.__file__:
            return True
        frame = frame.f_back
    return False


def _text_of(file: str, number: int) -> str:
    code = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}{f' ({code})' if code else ''}"


def _explain(error: Exception, kind: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    where = _text_of(own[-1].filename, own[-1].lineno or 0) if own else ""
    if isinstance(error, READS_VALUES):
        what = "reads the value of a tensor, and stages can't depend on data"
        hint = "torch.where in place of if, or layout='data'"
    else:
        first = (str(error).strip().splitlines() or [""])[0]
        what = f"can't be traced without data: {type(error).__name__}: {first:.200}"
        hint = "check the shapes of the inputs; layout='data' does not trace"
    return _TraceError(what, where, hint).text(kind)
