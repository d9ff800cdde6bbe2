"""Deferred construction: a model is built without memory, and computed tensor by tensor later.

``deferred()`` records the operators of a model's ``__init__`` on meta tensors. A
``Materialization`` executes them later.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .deferred_operators import Operator, SetState, View, draw, is_view

_READS_VALUE = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}

_OWN_GENERATOR = (
    "world.deferred: {} draws from a generator of its own. "
    "HINT: torch.manual_seed before world.deferred()"
)

_recordings: list["Recording"] = []


class Recording(TorchDispatchMode):
    """Record operators on new tensors, which are meta tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.random_state = self._last_state = torch.get_rng_state()
        self._alive: dict[int, torch.UntypedStorage] = {}  # so that no key is used twice

    def note_seed(self) -> None:
        """Record a change of the random state (``torch.manual_seed``); nothing draws meanwhile."""
        state = torch.get_rng_state()
        if not torch.equal(state, self._last_state):
            self._last_state = state
            self.operators.append(Operator(SetState(state), (), {}, [], set(), [], True))

    def has_tensors(self) -> bool:
        """Return whether any tensor uses a storage of the recording."""
        counts = map(torch._C._storage_Use_Count, self._alive)
        return any(count > 1 for count in counts)  # one is that of _alive

    def view(self, tensor: torch.Tensor) -> View | None:
        """Return the recorded view of a meta tensor; None for any other tensor."""
        if tensor.device.type != "meta" or tensor.untyped_storage()._cdata not in self._alive:
            return None
        storage = tensor.untyped_storage()
        layout = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        return View(storage._cdata, storage.nbytes(), tensor.dtype, *layout)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        schema = func._schema
        inputs = [t for t in tree_leaves((args, options)) if isinstance(t, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_recorded = any(self.view(tensor) for tensor in inputs)
        is_factory = any(argument.name == "device" for argument in schema.arguments) and not inputs
        if not (is_recorded or is_factory or is_random):
            return func(*args, **options)  # of tensors that exist, such as loaded ones
        if schema.name in _READS_VALUE:
            raise ValueError(
                f"world.deferred: {schema.name.removeprefix('aten::')} reads the value of a tensor "
                "that is computed later (.item(), .tolist(), if tensor). HINT: compute this value "
                "with Python's numbers, or before the with block"
            )
        self._check_supported(schema, args, options, is_recorded)
        meta_args, meta_options = tree_map(self._as_meta, (args, options))
        if is_factory or "device" in options:
            meta_options["device"] = torch.device("meta")
        output = func(*meta_args, **meta_options)
        self._record(func, args, options, output, is_random)
        return output

    def _check_supported(self, schema: Any, args: Any, options: Any, is_recorded: bool) -> None:
        changed = [
            a
            for i, a in enumerate(args)
            if i < len(schema.arguments)
            and (alias := schema.arguments[i].alias_info)
            and alias.is_write
        ]
        if any(isinstance(a, torch.Tensor) and self.view(a) is None for a in changed):
            raise ValueError(
                f"world.deferred: {schema.name} changes a tensor that was made from data or before "
                "the with block. HINT: make it in the with block, for example by torch.empty"
            )
        if options.get("generator") is not None:
            raise ValueError(_OWN_GENERATOR.format(schema.name))

    def _as_meta(self, value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.device.type != "meta"
        return value.to("meta") if is_real and value.dim() else value

    def _record(self, func: Any, args: Any, options: Any, output: Any, is_random: bool) -> None:
        schema = func._schema
        if is_random:
            self.note_seed()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = storage
        recorded_args, recorded_options = tree_map(self._as_view, (args, options))
        outputs = [self.view(t) for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        views = [
            v
            for v in tree_leaves((recorded_args, recorded_options), is_leaf=is_view)
            if isinstance(v, View)
        ]
        written = [
            value
            for i, value in enumerate(recorded_args)
            if isinstance(value, View)
            and (alias := schema.arguments[i].alias_info)
            and alias.is_write
        ]
        before = {v.storage for v in views}
        made = [v for v in outputs if v is not None]
        if not written and all(v.storage in before for v in made) and not is_random:
            return  # a view
        if schema.name.startswith("aten::empty") or schema.name.startswith("aten::new_empty"):
            return  # memory is made when something writes to it
        operator = Operator(func, recorded_args, recorded_options, made, before, written, is_random)
        self.operators.append(operator)

    def _as_view(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # a tensor that exists may change before it is used
        return self.view(value) or value.detach().clone()


class _NotMeta(TorchFunctionMode):
    """``tensor.is_meta`` is False: ``nn.init.orthogonal_`` and others skip meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


class _TruncNormal:
    """``nn.init.trunc_normal_`` as one operator: it draws again where values are out of bounds."""

    _schema = SimpleNamespace(name="trunc_normal_")

    def __init__(self, function: Callable[..., Any], recording: Recording) -> None:
        self._function, self._recording = function, recording

    def __call__(self, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        view = self._recording.view(tensor)
        if view is None:
            return self._function(tensor, *args, **options)
        if options.get("generator") is not None or any(
            isinstance(a, torch.Generator) for a in args
        ):
            raise ValueError(_OWN_GENERATOR.format("trunc_normal_"))
        with _disable_current_modes():
            self._recording.note_seed()
        operator = Operator(self, (view, *args), options, [view], {view.storage}, [view], True)
        self._recording.operators.append(operator)
        return tensor


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Build models without memory in this block; see ``Materialization``.

    Afterwards the random number generator is where an ordinary construction leaves it.

    Raises:
        ValueError: The construction reads a value that is computed later.
    """
    recording = Recording()
    trunc_normal = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = _TruncNormal(trunc_normal, recording)
    try:
        with recording, _NotMeta():
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = trunc_normal
    after = torch.get_rng_state()
    torch.set_rng_state(recording.random_state)
    for operator in recording.operators:
        if operator.is_random:
            draw(operator)
    if not torch.equal(after, recording._last_state):  # seeded after the last draw
        torch.set_rng_state(after)
    forget_recordings()
    _recordings.append(recording)


def forget_recordings() -> None:
    """Free the recordings none of whose tensors exists any more as a meta tensor."""
    _recordings[:] = [one for one in _recordings if one.has_tensors()]


def is_deferred(model: nn.Module) -> bool:
    """Return whether a model has tensors of ``deferred`` that were not computed."""
    return any(recording_of(tensor) for _, tensor in named_tensors(model))


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model, each once."""
    return [*model.named_parameters(), *model.named_buffers()]


def recording_of(tensor: torch.Tensor) -> Recording | None:
    """Return the recording of the construction that made a tensor; None for other tensors."""
    return next((one for one in _recordings if one.view(tensor)), None)
