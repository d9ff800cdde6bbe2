"""Comparison of a divided model with the whole one, in its first forward.

Operations on parts are right by themselves, or refused. What passes them by, such as code that
reads a part as if it were whole, is found here: outputs and gradients of the model are compared
with those of a forward that is not divided. Parameters get noise meanwhile, because zeros of an
initialization would hide errors.
"""

import functools
import random
import sys
import time
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ...optim.gradients import graph_nodes

# of nn.Module itself, such as parameters and hooks
_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set", "training"}
_NOT_FOLLOWED = (
    *(nn.Parameter, Dataset, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(torch.dtype, torch.device, str, bytes, int, float, type(None)),
)
_PACKAGES = frozenset(
    {"torch", "paceline", "numpy", "threading", "logging", "concurrent", "lightning"}
    | {"pytorch_lightning"}
)


class SavedAttributes:
    """The attributes of modules at one time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}  # by id, so that no object is freed meanwhile
        waiting: list[Any] = list(modules)
        while waiting:
            value = waiting.pop()
            if isinstance(value, _NOT_FOLLOWED) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting += self._save(value)

    def _save(self, value: Any) -> Iterable[Any]:
        """Save a value, and return what it holds."""
        if isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif _is_of_numpy(value, "random", "Generator"):
            bits = value.bit_generator
            self._generators.append((functools.partial(setattr, bits, "state"), bits.state))
        elif _is_of_numpy(value, "ndarray"):
            self._arrays.append((value, value.copy()))
        elif isinstance(value, (list, dict, set, deque)):
            copy = dict(value) if isinstance(value, dict) else list(value)
            self._containers.append((value, copy))
            yield from copy.values() if isinstance(copy, dict) else copy
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        if isinstance(value, nn.Module) or _is_followed(value):
            own = vars(value)
            saved = {name: held for name, held in own.items() if not _is_of_module(value, name)}
            self._spaces.append((own, saved))
            yield from saved.values()

    def _save_tensor(self, value: torch.Tensor) -> None:
        tensor = getattr(value, "local", value)  # of a tensor that is divided over ranks
        if tensor.layout is torch.strided:
            self._tensors.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Restore the attributes: the same objects with the same contents."""
        for own, saved in self._spaces:
            for name in own.keys() - saved.keys() - _OF_MODULES:
                del own[name]
            own.update(saved)
        for container, copy in self._containers:
            if not _is_same(container, copy):
                container.clear()
                is_sequence = isinstance(container, (list, deque))
                (container.extend if is_sequence else container.update)(copy)
        with torch.no_grad():
            for tensor, before in self._tensors:
                if type(tensor) is not torch.Tensor or not torch.equal(tensor, before):
                    tensor.copy_(before)
        for array, before in self._arrays:
            array[...] = before
        for give, state in self._generators:
            give(state)


def _is_same(container: Any, copy: Any) -> bool:
    """Return whether a container has the same objects in the same order."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(container, copy, strict=True))


def _is_of_module(owner: Any, name: str) -> bool:
    return isinstance(owner, nn.Module) and name in _OF_MODULES


def _is_of_numpy(value: Any, *path: str) -> bool:
    """Return whether a value has a class of NumPy, and can be changed."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return False
    kind: Any = sys.modules["numpy"]
    for name in path:
        kind = getattr(kind, name)
    return type(value) is kind and (path != ("ndarray",) or value.flags.writeable)


def _is_followed(value: Any) -> bool:
    """Return whether an object is one of the script's, with attributes."""
    package = type(value).__module__.partition(".")[0]
    return package not in _PACKAGES and isinstance(getattr(value, "__dict__", None), dict)


# relative differences of a norm that are accepted in any case
FLOORS = {torch.float64: 1e-8, torch.float32: 1e-3}
FLOOR_16_BIT = 0.1
ROUNDING_FACTOR = 50.0  # times the effect of changing each parameter by one epsilon
NOISE = 0.02  # of a parameter's mean magnitude
MIN_MAGNITUDE = 0.1
_SEED = 12345


class DividedModelError(ValueError):
    """A model, or an operation, whose divided result is not the whole one."""


@dataclass
class ModelComparison:
    """What the comparison of one forward has found.

    Attributes:
        seconds: Its time.
        difference: Largest relative difference of the whole model; None if it was not compared.
        reason: Why it was not compared.
    """

    seconds: float = 0.0
    difference: float | None = None
    reason: str = ""


Tensors = list[torch.Tensor | None]


class Division(ABC):
    """How a model is divided over ranks, as its comparison needs it.

    Attributes:
        subject: The divided model, in the words of an error.
        cause: What an error says after the difference, with a HINT.
        device: Type of device of the tensors that ``pieces`` exchanges.
    """

    subject: str
    cause: str
    device: str

    @abstractmethod
    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have the same shape."""

    @abstractmethod
    def divided(self) -> Any:
        """Run the forward with parts, and return whole outputs."""

    @abstractmethod
    def whole(self) -> Any:
        """Run the forward as on one rank, and return its outputs."""

    def why_not(self) -> str:
        """Return why the whole model can't be computed, the same on all ranks; "" if it can."""
        return ""

    def as_whole(self, takes_gradients: bool) -> AbstractContextManager[None]:
        """Return a context in which parameters are whole for ``whole`` and its gradients."""
        return nullcontext()

    def whole_gradients(self, gradients: Tensors) -> Tensors:
        """Return the gradients of the whole model from those of ``divided``. Collective."""
        return gradients

    def is_split(self, parameter: nn.Parameter) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return False

    def mean_magnitude(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the mean magnitude of a parameter, the same on all ranks."""
        return parameter.double().abs().mean()

    @property
    def rank(self) -> int:
        """This rank among those that hold parts."""
        return 0


def compare_model(model: nn.Module, division: Division, takes_gradients: bool) -> ModelComparison:
    """Compare a divided model with the whole one. Collective.

    Args:
        takes_gradients: Whether gradients are compared too.

    Raises:
        DividedModelError: The model differs.
    """
    start = time.perf_counter()
    result = ModelComparison(reason=division.why_not())
    takes_gradients = takes_gradients and not torch.is_inference_mode_enabled()
    trained = [p for p in model.parameters() if p.requires_grad] if takes_gradients else []
    with unchanged(model), torch.set_grad_enabled(takes_gradients):
        if takes_gradients:
            _add_noise(model, NOISE, division)
        state = _State(model)
        outputs, gradients = _results(division.divided, trained)
        ours = outputs, division.whole_gradients(gradients)
        if not outputs and not result.reason:
            result.reason = "it returns no floating-point tensors"
        if not result.reason:
            state.restore()
            theirs = _whole_results(division, trained, takes_gradients)
            state.restore()
            rounded = theirs
            if takes_gradients:
                _add_noise(model, None, division)
                rounded = _whole_results(division, trained, takes_gradients)
            result.difference = _judge(model, trained, division, ours, theirs, rounded)
    result.seconds = time.perf_counter() - start
    return result


def _whole_results(
    division: Division, trained: list[nn.Parameter], takes_gradients: bool
) -> tuple[Tensors, Tensors]:
    with division.as_whole(takes_gradients):
        return _results(division.whole, trained)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest of outputs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _results(forward: Callable[[], Any], trained: list[nn.Parameter]) -> tuple[Tensors, Tensors]:
    """Return the outputs of a forward, and the gradients of a random sum of them."""
    every = tensors_in(forward())
    outputs = [_real(t) for t in every if t.is_floating_point() or t.is_complex()]
    found: Tensors = [output.detach() for output in outputs]
    sources = [output for output in outputs if output.requires_grad]
    if not trained or not sources:
        return found, []
    generator = torch.Generator().manual_seed(_SEED)
    directions = [torch.randn(source.shape, generator=generator).to(source) for source in sources]
    _refuse_reentrant_checkpoints(sources)
    gradients = torch.autograd.grad(sources, trained, directions, allow_unused=True)
    return found, [None if gradient is None else gradient.detach() for gradient in gradients]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _refuse_reentrant_checkpoints(outputs: list[torch.Tensor]) -> None:
    """Raise ValueError for recomputed parts, which ``torch.autograd.grad`` can't enter."""
    nodes = graph_nodes(output.grad_fn for output in outputs)
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
        raise ValueError(
            "world.distribute: the model recomputes by checkpoint(..., use_reentrant=True), whose "
            "gradients can't be compared with those of the whole model. HINT: "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def _judge(
    model: nn.Module,
    trained: list[nn.Parameter],
    division: Division,
    ours: tuple[Tensors, Tensors],
    theirs: tuple[Tensors, Tensors],
    rounded: tuple[Tensors, Tensors],
) -> float:
    """Return the largest relative difference. Collective.

    Raises:
        DividedModelError: It is more than rounding explains, on any rank.
    """
    worst, largest, where = 0.0, 0.0, ""  # worst: in parts of its limit
    names = {id(p): name for name, p in model.named_parameters()}
    labels = [
        [f"output {i + 1}" for i in range(len(theirs[0]))],
        [f"the gradient of {names[id(p)]}" for p in trained],
    ]
    ours, theirs, rounded = (
        (outputs, [None if gradient is None else _real(gradient) for gradient in gradients])
        for outputs, gradients in (ours, theirs, rounded)
    )
    for number in (0, 1):
        scale = max((_norm(t) for t in theirs[number]), default=0.0)
        if len(ours[number]) != len(theirs[number]):
            worst, where = float("inf"), "the number of outputs"
        for label, a, b, c in zip(
            labels[number], ours[number], theirs[number], rounded[number], strict=False
        ):
            if b is None or a is None:
                difference, limit = (0.0 if a is b else _norm(a) + _norm(b)), 1e-6 * scale
            else:
                floor = FLOORS.get(b.dtype, FLOOR_16_BIT)
                if torch.is_autocast_enabled(b.device.type):
                    floor = FLOOR_16_BIT
                of = max(_norm(b), 1e-6 * scale, 1e-30)
                difference = _distance(a, b) / of
                noise = 0.0 if c is None else _distance(c, b) / of
                limit = max(floor, ROUNDING_FACTOR * noise)
            part = difference / limit if limit else difference and float("inf")
            if a is not None and b is not None:  # of gradients that are not only rounding
                largest = max(largest, _distance(a, b) / max(of, 1e-3 * scale))
            if not part <= worst:
                worst, where = part, f"{label} (by {difference:.2g}, relative)"
    others = [0.0 if t is None else float((~t.isfinite()).sum()) for t in ours[0]]
    norms = torch.tensor([*map(_norm, ours[0]), *others], device=division.device)
    of_ranks = division.pieces(norms)
    if any(not torch.allclose(t, norms, rtol=1e-3, equal_nan=True) for t in of_ranks):
        worst, where = float("inf"), "its outputs are not the same on all ranks"
    own = torch.tensor([worst], dtype=torch.float64, device=division.device)
    most = max(float(t) for t in division.pieces(own))
    if not most <= 1.0:
        raise DividedModelError(
            f"world.distribute: {division.subject} differs from the whole one: "
            f"{where if worst > 1 else 'on another rank'}. {division.cause}; "
            "world.distribute(..., compare=False) trains nevertheless"
        )
    return largest


def _norm(tensor: torch.Tensor | None) -> float:
    """Return the norm of the finite elements: one infinite output must not hide the others."""
    if tensor is None:
        return 0.0
    return float(torch.linalg.vector_norm(tensor.double().nan_to_num(0.0, 0.0, 0.0)))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    both = (a == b) | (a.isnan() & b.isnan())
    difference = (a.double() - b.double()).masked_fill(both, 0)
    return _norm(difference) if bool(difference.isfinite().all()) else float("inf")


def _add_noise(model: nn.Module, factor: float | None, division: Division) -> None:
    """Change the parameters by noise, alike on all ranks that hold copies.

    Args:
        factor: Part of a parameter's mean magnitude; None: one epsilon of each element.
    """
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            seed = 2 * number
            if division.is_split(parameter):
                seed += 1000003 * (division.rank + 1)
            generator = torch.Generator().manual_seed(_SEED + seed)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if factor is None:
                scale = parameter.abs() * torch.finfo(parameter.dtype).eps
            else:
                magnitude = division.mean_magnitude(parameter)
                scale = (factor * magnitude.clamp(min=MIN_MAGNITUDE)).to(parameter.dtype)
            parameter.add_(noise * scale)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers, attributes and random states at the end."""
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    state = _State(model)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, saved in parameters:
                parameter.copy_(saved)
        state.restore()


class _State:
    """Buffers, attributes and random states that a forward changes."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = SavedAttributes(model.modules())
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        self._attributes.restore()
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
