"""Deferred construction: a model is built without memory, and computed tensor by tensor later.

``deferred()`` records the operators of a model's ``__init__`` on meta tensors. A
``Materialization`` executes them later. Tensors are identified by storage, offset and
strides. So views, tied weights and the parameters made from a tensor need no operator of their own.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# The recorded operators, and their execution.

_OVERWRITES = {"aten::zero_", "aten::fill_", "aten::copy_"}


class View(NamedTuple):
    """A recorded tensor: a view of the storage with this key."""

    storage: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def covers_storage(self) -> bool:
        numel = 1
        for length in self.size:
            numel *= length
        steps = sorted(zip(self.stride, self.size, strict=True))
        expected = 1
        for stride, length in steps:
            if length != 1 and stride != expected:
                return False
            expected *= length
        return numel * self.dtype.itemsize == self.nbytes


class Operator(NamedTuple):
    """A recorded call."""

    func: Any
    args: Any  # with View in place of recorded tensors
    options: Any
    outputs: list[View]
    read: set[int]  # storages
    written: list[View]
    is_random: bool

    @property
    def overwritten(self) -> View | None:
        """The storage that this operator fills without reading it."""
        if len(self.written) != 1 or not self.written[0].covers_storage:
            return None
        name = self.func._schema.name
        fills = self.is_random and not any(isinstance(a, View) for a in self.args[1:])
        return self.written[0] if fills or name in _OVERWRITES else None


class SetState:
    """Set the state of the random number generator, as ``torch.manual_seed`` does."""

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state

    def __call__(self) -> None:
        torch.set_rng_state(self._state)


def is_view(value: Any) -> bool:
    """Return whether a value is a view."""
    return isinstance(value, View)


def draw(operator: Operator) -> None:
    """Advance the random number generator as an operator does, and drop the numbers."""

    def scratch(value: Any) -> Any:
        if not isinstance(value, View):
            return value
        # 0.5: a valid probability and deviation
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype).fill_(0.5)

    args, options = tree_map(scratch, (operator.args, operator.options), is_leaf=is_view)
    with torch.no_grad():
        operator.func(*args, **options)


def needed(operators: list[Operator], wanted: set[int]) -> set[int]:
    """Return the indices of the operators on which the wanted storages depend."""
    live, needed = set(wanted), set()
    for i in range(len(operators) - 1, -1, -1):
        operator = operators[i]
        results = {view.storage for view in (*operator.outputs, *operator.written)}
        if not results & live:
            continue
        needed.add(i)
        overwritten = operator.overwritten
        if overwritten is not None:
            live.discard(overwritten.storage)
        live |= operator.read - ({overwritten.storage} if overwritten else set())
    return needed


def schedule(operators: list[Operator], executed: set[int]) -> list[int]:
    """Return the indices of the random operators and of those to be executed, in a possible order.

    Random operators keep their order. Any other follows directly on the last operator that it
    depends on, so that a tensor is complete early: also one that a loop over all modules scales
    after their construction.
    """
    followers: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}  # number of operators that have to come before
    latest: dict[int, int] = {}  # last operator on a storage
    for i in sorted(executed):
        storages = touched(operators[i])
        before = {latest[storage] for storage in storages if storage in latest}
        waiting[i] = len(before)
        for other in before:
            followers.setdefault(other, []).append(i)
        latest |= dict.fromkeys(storages, i)
    order: dict[int, None] = {}
    for i, operator in enumerate(operators):
        stack = [i] if operator.is_random or i in executed else []
        while stack:
            now = stack.pop()
            if now in order:
                continue
            order[now] = None
            for other in followers.get(now, ()):
                waiting[other] -= 1
                if not waiting[other] and not operators[other].is_random:
                    stack.append(other)
    return list(order)


def touched(operator: Operator) -> set[int]:
    """Return the storages that an operator reads or makes."""
    return operator.read | {view.storage for view in operator.outputs}


def tensor_of(view: View, real: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the tensor of a view, in memory that is made or made larger if necessary."""
    storage = real.setdefault(view.storage, torch.UntypedStorage(0))
    if storage.nbytes() < view.nbytes:
        storage.resize_(view.nbytes)
    return view_of(view, storage)


def view_of(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the tensor that a view is of this memory."""
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)


def execute(operator: Operator, real: dict[int, torch.UntypedStorage]) -> None:
    """Execute an operator on the memory of its storages, and add the memory that it makes.

    Args:
        real: The memory of each storage that was computed and is still needed.
    """

    def resolve(value: Any) -> Any:
        return tensor_of(value, real) if isinstance(value, View) else value

    args, options = tree_map(resolve, (operator.args, operator.options), is_leaf=is_view)
    found = operator.func(*args, **options)
    made = [tensor for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)]
    for view, tensor in zip(operator.outputs, made, strict=True):
        if view.storage in operator.read:
            continue
        if tensor.stride() == view.stride and tensor.untyped_storage().nbytes() == view.nbytes:
            real[view.storage] = tensor.untyped_storage()
        else:  # LAPACK's results may have other strides than those of meta tensors
            tensor_of(view, real).copy_(tensor)


# Recording

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
    _recordings[:] = [recording for recording in _recordings if recording.has_tensors()]


def is_deferred(model: nn.Module) -> bool:
    """Return whether a model has tensors of ``deferred`` that were not computed."""
    return any(recording_of(tensor) for _, tensor in named_tensors(model))


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a model, each once."""
    return [*model.named_parameters(), *model.named_buffers()]


def recording_of(tensor: torch.Tensor) -> Recording | None:
    """Return the recording of the construction that made a tensor; None for other tensors."""
    return next((recording for recording in _recordings if recording.view(tensor)), None)
