"""Export a model: through every backend that can express it, measured, and the best one kept."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ..security.removal import TemporaryFolder
from ..security.text import printable
from ..version import __version__
from .builtin.translate import translate
from .builtin.values import UnsupportedError
from .model_file import (
    CompileError,
    OnnxError,
    compile_model,
    export_onnx,
    onnxruntime_library,
    processor,
    torch_abi,
    torch_library,
    without_changes,
    write_model_file,
)
from .native_model import NativeModel, NativeModelError, library
from .specification import (
    DEFAULT_BOUNDS,
    MAX_RANK,
    MAX_SYMBOLS,
    MAX_TENSORS,
    FieldValues,
    ModelSpec,
    TensorSpec,
    normalisation,
    spec_json,
)

BACKENDS = ("builtin", "onnxruntime", "aotinductor")  # from the fewest needs to the most
TOLERANCE = {"float32": 1e-6, "float64": 1e-13}
BATCHES = (1, 3, 64, 1024)  # of the test vectors, as far as bounds and MAX_CASE_BYTES allow
MAX_CASE_BYTES = 1 << 20
FASTER = 1.1  # a backend with more needs must be this many times faster
MEASURE_S = 0.2
SEED = 20240229


class ExportError(ValueError):
    """No backend can compute the model within the tolerance."""


@dataclass
class Candidate:
    """A backend that was tried.

    Attributes:
        reason: Why it can't be used; "" if it can.
        error: Largest error of the test vectors, relative to the largest output.
        call_s: Seconds of a call for each of ``ExportResult.batches``.
    """

    name: str
    reason: str = ""
    error: float = 0.0
    call_s: list[float] = field(default_factory=list)
    bytes: int = 0


@dataclass
class ExportResult:
    """What was exported."""

    file: str
    backend: str
    needs: str
    setting: str
    bytes: int
    dtype: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    tolerance: float
    batches: list[dict[str, int]]
    eager_s: list[float]
    eager_error: float
    candidates: list[Candidate]


class Normalised(nn.Module):
    """A model whose inputs and outputs are in the units of the solver."""

    def __init__(self, model: nn.Module, before: Sequence[Any], after: Sequence[Any]) -> None:
        super().__init__()
        self.model = model
        self._before, self._after = len(before), len(after)
        for kind, pairs in (("before", before), ("after", after)):
            for i, pair in enumerate(pairs):
                for name, tensor in zip(("mean", "std"), pair or (None, None), strict=True):
                    self.register_buffer(f"{kind}_{i}_{name}", tensor)

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = [self._apply_pair("before", i, x) for i, x in enumerate(inputs)]
        results = self.model(*given)
        if isinstance(results, torch.Tensor):
            return self._apply_pair("after", 0, results)
        return tuple(self._apply_pair("after", i, y) for i, y in enumerate(results))

    def _apply_pair(self, kind: str, i: int, x: torch.Tensor) -> torch.Tensor:
        mean = getattr(self, f"{kind}_{i}_mean", None)
        std = getattr(self, f"{kind}_{i}_std", None)
        if mean is None or std is None:
            return x
        result: torch.Tensor = (x - mean) / std if kind == "before" else x * std + mean
        return result


def export_model(
    model: nn.Module,
    inputs: Sequence[TensorSpec],
    dtype: str,
    path: Path,
    *,
    examples: Sequence[torch.Tensor] = (),
    bounds: Mapping[str, tuple[int, int]] | None = None,
    fields: Mapping[str, FieldValues] | None = None,
    backends: Sequence[str] = BACKENDS,
    tolerance: float | None = None,
    about: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ExportResult:
    """Write a model file.

    Args:
        model: In any mode; it is exported in evaluation mode. It is not changed.
        inputs: Name and shape of each input.
        dtype: "float32" or "float64": parameters are converted to it.
        examples: Values for the test vectors; without them, random numbers.
        bounds: Least and largest value of symbolic sizes; default: 1 to 16,777,216.
        fields: Units and normalisation, by names of inputs and outputs.
        backends: Which ones to try.
        tolerance: Largest error relative to the largest output; default: 1e-6 or 1e-13, or twice
            the rounding error of eager PyTorch in float32, if that is larger.
        about: More entries of the manifest.
        say: Prints progress.

    Raises:
        ExportError: No backend can compute the model within the tolerance.
        ValueError: An argument is wrong, or PyTorch can't export the model.
    """
    library()
    _check_backends(backends)
    with _frozen(model, dtype) as frozen, TemporaryFolder("paceline-export-") as folder:
        job = _prepare(frozen, inputs, dtype, bounds or {}, fields or {}, examples)
        limit = max(TOLERANCE[dtype], 2 * job.own_error) if tolerance is None else tolerance
        return _Trials(job, limit, folder, say, about or {}).run(backends, path)


def _check_backends(backends: Sequence[str]) -> None:
    if unknown := [backend for backend in backends if backend not in BACKENDS]:
        raise ValueError(f"unknown backend {printable(unknown[0])}. HINT: {', '.join(BACKENDS)}")


@contextmanager
def _frozen(model: nn.Module, dtype: str) -> Iterator[nn.Module]:
    """Yield a copy of a model on the CPU, in evaluation mode and of the dtype; with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield copy.deepcopy(model).to("cpu").to(getattr(torch, dtype)).eval().requires_grad_(False)
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Job:
    """A model, its specification and its test vectors."""

    model: nn.Module
    spec: ModelSpec
    exported: ExportedProgram
    sizes: list[dict[str, int]]
    given: list[list[torch.Tensor]]
    expected: list[list[torch.Tensor]]
    own_error: float  # rounding error of eager PyTorch in float32; 0 in float64


def _prepare(
    model: nn.Module,
    inputs: Sequence[TensorSpec],
    dtype: str,
    bounds: Mapping[str, tuple[int, int]],
    fields: Mapping[str, FieldValues],
    examples: Sequence[torch.Tensor],
) -> _Job:
    inputs = [TensorSpec(x.name, x.shape, fields.get(x.name, x.values)) for x in inputs]
    names = list(dict.fromkeys(s for x in inputs for s in x.shape if isinstance(s, str)))
    if unknown := set(bounds) - set(names):
        raise ValueError(
            f"--bound {unknown.pop()} is no size of an input. HINT: sizes are {', '.join(names)}"
        )
    if len(names) > MAX_SYMBOLS or not 1 <= len(inputs) <= MAX_TENSORS:
        raise ValueError(
            f"1 to {MAX_TENSORS} inputs and up to {MAX_SYMBOLS} symbolic sizes are possible"
        )
    limits = {name: bounds.get(name, DEFAULT_BOUNDS) for name in names}
    inputs = [_with_fixed_sizes(x, limits) for x in inputs]
    limits = {name: (least, most) for name, (least, most) in limits.items() if least < most}
    spec = ModelSpec(dtype, tuple(inputs), (), limits)
    sample = make_inputs(spec, _trace_sizes(limits), examples)
    plain = _call(model, sample)
    outputs = _name_outputs(plain, fields, {x.name for x in inputs})
    before = [normalisation(x.values, x, "input") for x in inputs]
    after = [normalisation(y.values, y, "output") for y in outputs]
    whole = model
    if any(before) or any(after):
        whole = Normalised(model, before, after).to(spec.torch_dtype).eval()
    exported = _export_graph(whole, spec, sample)
    spec = ModelSpec(dtype, tuple(inputs), _symbolic_outputs(outputs, exported, spec), limits)
    sizes = _case_sizes(spec)
    given = [make_inputs(spec, case, examples) for case in sizes]
    expected = [_call(whole, case) for case in given]
    own = _rounding_error(whole, given, expected) if dtype == "float32" else 0.0
    return _Job(whole, spec, exported, sizes, given, expected, own)


def _rounding_error(
    model: nn.Module, given: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]
) -> float:
    """Return the largest error of results in float32, from the same model in float64; 0 without."""
    try:
        twice = copy.deepcopy(model).double()
        exact = [_call(twice, [x.double() for x in case]) for case in given]
    except ValueError:  # it has operators that float64 lacks
        return 0.0
    error = max(relative_error(y, want) for y, want in zip(expected, exact, strict=True))
    return error if math.isfinite(error) else 0.0


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest error of outputs, each relative to its largest value."""
    worst = 0.0
    for y, want in zip(found, expected, strict=True):
        largest = want.abs().max().item() or 1.0
        error = (y.double() - want.double()).abs().max().item() / largest
        worst = max(worst, error if error == error else math.inf)
    return worst


def _with_fixed_sizes(spec: TensorSpec, limits: Mapping[str, tuple[int, int]]) -> TensorSpec:
    """Return an input with numbers in place of names whose bounds are equal."""
    shape = tuple(
        limits[size][0] if isinstance(size, str) and limits[size][0] == limits[size][1] else size
        for size in spec.shape
    )
    return TensorSpec(spec.name, shape, spec.values)


def _trace_sizes(limits: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return sizes that differ from each other, and from 0 and 1, which torch.export fixes."""
    sizes: dict[str, int] = {}
    for i, (name, (least, most)) in enumerate(limits.items()):
        sizes[name] = min(max(least, 5 + 2 * i), most)
    return sizes


def make_inputs(
    spec: ModelSpec, sizes: Mapping[str, int], examples: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return inputs of given sizes: rows of the examples, or random numbers."""
    generator = torch.Generator().manual_seed(SEED)
    made = []
    for i, tensor_spec in enumerate(spec.inputs):
        shape = tensor_spec.concrete(sizes)
        if i < len(examples) and examples[i].shape[1:] == shape[1:] and len(examples[i]):
            rows = torch.arange(shape[0]) % len(examples[i])
            made.append(examples[i].detach().cpu()[rows].to(spec.torch_dtype).contiguous())
            continue
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        pair = normalisation(tensor_spec.values, tensor_spec, "input")
        made.append((x if pair is None else x * pair[1] + pair[0]).to(spec.torch_dtype))
    return made


def _call(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    try:
        with torch.no_grad():
            results = model(*(x.clone() for x in inputs))
    except Exception as error:
        shapes = ", ".join(str(list(x.shape)) for x in inputs)
        raise ValueError(
            f"the model failed for inputs of the shapes {shapes}: {type(error).__name__}: {error}. "
            "HINT: --input 'x: float32[batch,6]' gives the shape"
        ) from error
    results = [results] if isinstance(results, torch.Tensor) else results
    if not isinstance(results, tuple | list) or not all(
        isinstance(y, torch.Tensor) for y in results
    ):
        raise ValueError(
            f"the model returns {type(results).__name__}. HINT: return a tensor or a tuple of "
            f"tensors"
        )
    return [y.contiguous() for y in results]


def _name_outputs(
    results: Sequence[torch.Tensor], fields: Mapping[str, FieldValues], inputs: set[str]
) -> list[TensorSpec]:
    many = len(results) > 1
    names = [f"y{i}" if many else "y" for i in range(len(results))]
    if unknown := set(fields) - set(names) - inputs:
        raise ValueError(
            f"--fields: {printable(sorted(unknown)[0])} is no input or output. HINT: they are "
            f"{', '.join([*sorted(inputs), *names])}"
        )
    if not 1 <= len(results) <= MAX_TENSORS or any(y.dim() > MAX_RANK for y in results):
        raise ValueError(f"the model has {len(results)} outputs; 1 to {MAX_TENSORS} are possible")
    return [
        TensorSpec(name, tuple(y.shape), fields.get(name, FieldValues()))
        for name, y in zip(names, results, strict=True)
    ]


def _export_graph(model: nn.Module, spec: ModelSpec, sample: list[torch.Tensor]) -> ExportedProgram:
    dims: dict[str, Any] = {}
    for name, (least, most) in spec.bounds.items():
        dims[name] = Dim(name, min=least, max=most)
    shapes = tuple(
        {i: dims[s] for i, s in enumerate(x.shape) if isinstance(s, str)} or None
        for x in spec.inputs
    )
    if isinstance(model, Normalised):
        shapes = (shapes,)  # type: ignore[assignment]  # forward(*inputs)
    try:
        exported = torch.export.export(model, tuple(sample), dynamic_shapes=shapes)
    except Exception as error:
        raise ValueError(
            f"torch.export can't export the model: {type(error).__name__}: {str(error)[:2000]} "
            "HINT: conditions on values, and sizes that change within the model, can't be "
            "exported; a size can be fixed: --input 'x: float32[64,6]'"
        ) from error
    return without_changes(exported)


def _symbolic_outputs(
    outputs: Sequence[TensorSpec], exported: ExportedProgram, spec: ModelSpec
) -> tuple[TensorSpec, ...]:
    """Return the outputs with the symbolic sizes of the inputs in their shapes."""
    nodes = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    known: dict[str, str] = {}
    for name, x in zip(exported.graph_signature.user_inputs, spec.inputs, strict=True):
        for size, symbol in zip(nodes[str(name)].meta["val"].shape, x.shape, strict=True):
            if isinstance(symbol, str) and isinstance(size, torch.SymInt):
                known[str(size)] = symbol
    results = next(n for n in exported.graph.nodes if n.op == "output").args[0]
    named = []
    for output, node in zip(outputs, results, strict=True):
        meta = node.meta["val"]
        if str(meta.dtype).removeprefix("torch.") != spec.dtype:
            raise ValueError(
                f"output {output.name} is {meta.dtype}; the inputs are {spec.dtype}. HINT: let the "
                f"model return .to({spec.dtype}), or choose another dtype by --input"
            )
        shape: list[int | str] = []
        for size in meta.shape:
            if isinstance(size, int):
                shape.append(size)
            elif str(size) in known:
                shape.append(known[str(size)])
            else:
                raise ValueError(
                    f"output {output.name} has the size {size}, which is no size of an input. "
                    "HINT: fix that size of the input: --input 'x: float32[batch,3,64,64]'"
                )
        named.append(TensorSpec(output.name, tuple(shape), output.values))
    return tuple(named)


def _case_sizes(spec: ModelSpec) -> list[dict[str, int]]:
    """Return the symbolic sizes of the test vectors, from small to large."""
    found: list[dict[str, int]] = []
    width = 4 if spec.dtype == "float32" else 8
    for batch in BATCHES:
        sizes = {
            name: min(max(least, batch if i == 0 else min(batch, 8)), most)
            for i, (name, (least, most)) in enumerate(spec.bounds.items())
        }
        shapes = [tensor_spec.concrete(sizes) for tensor_spec in (*spec.inputs, *spec.outputs)]
        count = sum(torch.Size(shape).numel() for shape in shapes)
        if sizes not in found and (not found or count * width <= MAX_CASE_BYTES):
            found.append(sizes)
    return found


class _Trials:
    """Tries the backends, measures each, and writes the best one."""

    def __init__(
        self,
        job: _Job,
        tolerance: float,
        folder: Path,
        say: Callable[[str], None],
        about: Mapping[str, Any],
    ) -> None:
        self.job, self.tolerance, self.folder, self.say = job, tolerance, folder, say
        self.about = about
        self.made: dict[str, dict[str, bytes]] = {}
        tensors = [
            x for given, want in zip(job.given, job.expected, strict=True) for x in (*given, *want)
        ]
        self.vectors = b"".join(x.numpy().tobytes() for x in tensors)

    def run(self, backends: Sequence[str], path: Path) -> ExportResult:
        candidates = [self._try(name) for name in BACKENDS if name in backends]
        best = choose(candidates)
        if best is None:
            lines = "\n".join(f"  {candidate.name}: {candidate.reason}" for candidate in candidates)
            raise ExportError(
                f"no backend can compute the model in {self.job.spec.dtype} within "
                f"{self.tolerance:g} of the largest output:\n{lines}\n"
                "HINT: another --tolerance, or another --backend"
            )
        self.say("measuring eager PyTorch")
        eager = [self._time_eager(given) for given in self.job.given]
        measured = {"eager": eager, **{c.name: c.call_s for c in candidates if not c.reason}}
        manifest = {**self._manifest(best.name), "call_s": measured}
        size = write_model_file(path, manifest, self._sections(best.name))
        spec = self.job.spec
        return ExportResult(
            file=str(path),
            backend=best.name,
            needs=needs(best.name),
            setting=setting(best.name),
            bytes=size,
            dtype=spec.dtype,
            inputs=[spec_json(x, spec.dtype) for x in spec.inputs],
            outputs=[spec_json(y, spec.dtype) for y in spec.outputs],
            tolerance=self.tolerance,
            batches=self.job.sizes,
            eager_s=eager,
            eager_error=self.job.own_error,
            candidates=candidates,
        )

    def _try(self, name: str) -> Candidate:
        self.say(f"{name}: exporting" if name != "aotinductor" else f"{name}: compiling")
        candidate = Candidate(name)
        try:
            self.made[name] = self._make(name)
        except (UnsupportedError, OnnxError, CompileError) as error:
            candidate.reason = f"can't express the model: {error}"
            return candidate
        trial = self.folder / f"{name}.paceline"
        candidate.bytes = write_model_file(trial, self._manifest(name), self._sections(name))
        self.say(f"{name}: measuring")
        place = {"onnxruntime": onnxruntime_library, "aotinductor": torch_library}
        try:
            library_path = place[name]() if name in place else ""
            with NativeModel(trial, library_path=library_path) as model:
                candidate.error = self._error(model)
                if not candidate.error <= self.tolerance:
                    candidate.reason = (
                        f"error {candidate.error:.2g}, tolerance {self.tolerance:.2g}"
                    )
                    return candidate
                candidate.call_s = [model.measure(i, MEASURE_S) for i in range(len(self.job.sizes))]
        except NativeModelError as error:
            candidate.reason = str(error).removeprefix(f"{trial}: ")
        return candidate

    def _error(self, model: NativeModel) -> float:
        worst = 0.0
        for given, expected in zip(self.job.given, self.job.expected, strict=True):
            found = [torch.empty_like(y) for y in expected]
            model.run(given, found)
            worst = max(worst, relative_error(found, expected))
        return worst

    def _make(self, name: str) -> dict[str, bytes]:
        exported, spec = self.job.exported, self.job.spec
        if name == "builtin":
            made = translate(exported, spec.torch_dtype)
            return {"program": made.program, "weights": made.weights}
        if name == "onnxruntime":
            return {"onnx": export_onnx(exported, spec)}
        return {"aotinductor": compile_model(exported, self.folder)}

    def _sections(self, name: str) -> dict[str, bytes]:
        return {**self.made[name], "vectors": self.vectors}

    def _manifest(self, name: str) -> dict[str, Any]:
        spec = self.job.spec
        own: dict[str, Any] = {"processor": {"architecture": "any", "features": []}}
        if name == "aotinductor":
            own = {"processor": processor(), "torch_abi": torch_abi()}
        return {
            "format": "paceline-model",
            "paceline": __version__,
            "torch": torch.__version__,
            **self.about,
            "backend": name,
            "needs": needs(name),
            "dtype": spec.dtype,
            "symbols": [{"name": n, "min": a, "max": b} for n, (a, b) in spec.bounds.items()],
            "inputs": [spec_json(x, spec.dtype) for x in spec.inputs],
            "outputs": [spec_json(y, spec.dtype) for y in spec.outputs],
            "vectors": [[sizes[symbol] for symbol in spec.bounds] for sizes in self.job.sizes],
            "tolerance": self.tolerance,
            **own,
        }

    def _time_eager(self, given: Sequence[torch.Tensor]) -> float:
        """Return the median seconds of a call of the model in PyTorch, with one thread."""
        rounds: list[float] = []
        with torch.inference_mode():
            self.job.model(*given)
            end = time.perf_counter() + MEASURE_S
            while time.perf_counter() < end or len(rounds) < 5:
                begin = time.perf_counter()
                self.job.model(*given)
                rounds.append(time.perf_counter() - begin)
        return median(rounds)


def setting(name: str) -> str:
    """Return the environment variable by which a solver finds the library of this Python; or ""."""
    return {
        "builtin": "",
        "onnxruntime": f"PACELINE_ONNXRUNTIME={onnxruntime_library()}",
        "aotinductor": f"PACELINE_LIBTORCH={torch_library()}",
    }[name]


def needs(name: str) -> str:
    """Return what a model of a backend needs where it runs."""
    version = torch.__version__.partition("+")[0]
    return {
        "builtin": "nothing but libpaceline.so",
        "onnxruntime": "libonnxruntime.so, version 1.17 or later",
        "aotinductor": f"libtorch of PyTorch {version}, and a processor like this one",
    }[name]


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest backend; one with more needs must be clearly faster.

    Speeds are compared by the product of the times for all batches.
    """

    def slowness(candidate: Candidate) -> float:
        return math.prod(candidate.call_s) ** (1 / max(1, len(candidate.call_s)))

    best: Candidate | None = None
    for candidate in candidates:  # from the fewest needs to the most
        is_best = best is None or slowness(candidate) * FASTER < slowness(best)
        if not candidate.reason and is_best:
            best = candidate
    return best
