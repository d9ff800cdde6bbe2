"""Write a model file, and its sections for ONNX Runtime and AOTInductor.

A model file is a manifest as JSON and sections of data, with the SHA-256 of each.
``native/src/artifact.c`` reads it, and describes the layout.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import platform
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..cluster.topology.topology import cpu_flags
from ..security.outputs import write_output
from .specification import ModelSpec

MAGIC = b"\x89PCLN\r\n\x1a"
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER = struct.Struct("<8sIIQ32s8x")
NEEDED = ("onnx", "onnxscript", "onnxruntime")  # for the model as ONNX
# Of the flags in /proc/cpuinfo, those that the compiler may have used with -march=native.
FEATURES = re.compile(
    r"(avx|amx|sse|ssse|fma|bmi|f16c|abm|adx|popcnt|movbe|gfni|vaes|vpclmul|asimd|sve|fphp|bf16|i8mm)\w*"
)
MAX_CODE_BYTES = 1 << 30


# Programs of ``torch.export`` without operators that change a tensor in place.


def without_changes(exported: ExportedProgram) -> ExportedProgram:
    """Return a program in which each change in place is a new value, also in later uses of the
    tensor and of its views.

    Raises:
        ValueError: The model changes its inputs or its buffers, which belong to the caller and to
            all calls, or an operator has no form without a change.
    """
    if not _changes(exported):
        return exported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})  # no operator is taken apart
    except Exception as error:  # of any kind
        raise ValueError(
            f"the model changes tensors in place: {type(error).__name__}: {str(error)[:2000]} "
            "HINT: operators that return a new tensor, as x = x + 1 for x += 1"
        ) from error
    signature = exported.graph_signature
    if signature.user_inputs_to_mutate:
        raise ValueError("the model changes an input in place. HINT: x = x.clone() before that")
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise ValueError(
            "the model changes its buffers or parameters in evaluation mode. HINT: let it return "
            "what has to be kept between calls"
        )
    if left := _changes(exported):
        raise ValueError(f"the operator {left[0]} changes a tensor in place")
    return exported


def _changes(exported: ExportedProgram) -> list[str]:
    """Return the operators that change values in place: all such ones but detach_."""
    return [
        str(node.target)
        for node in exported.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target is not torch.ops.aten.detach_.default
    ]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_model_file(manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Return the content of a model file. Each section becomes an entry of manifest["sections"]."""
    entries: list[dict[str, Any]] = [
        {"name": name, "offset": 0, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    text = b""
    while True:  # offsets depend on the length of the manifest, which depends on them
        at = HEADER.size + len(text)
        for entry in entries:
            at = _padded(at)
            entry["offset"] = at
            at += entry["bytes"]
        new = json.dumps({**manifest, "sections": entries}, allow_nan=False, indent=1).encode()
        new = new.ljust(len(text))  # never shorter than the last one, so that this ends
        done = len(new) == len(text)
        text = new
        if done:
            break
    content = bytearray(
        HEADER.pack(MAGIC, FORMAT_VERSION, len(text), at, hashlib.sha256(text).digest())
    )
    content += text
    for data in sections.values():
        content += bytes(_padded(len(content)) - len(content)) + data
    return bytes(content)


def write_model_file(path: Path, manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> int:
    """Write a model file, completely or not at all. Return its bytes. Raises OSError."""
    content = encode_model_file(manifest, sections)
    write_output(path, content)
    return len(content)


# The AOTInductor backend's side of the export: the model compiled to machine code.


class CompileError(ValueError):
    """PyTorch could not compile the model; the message says why."""


def compile_model(exported: ExportedProgram, folder: Path) -> bytes:
    """Return the shared library that AOTInductor makes of a model. folder: for temporary files.

    Raises:
        CompileError: There is no C++ compiler, or the compilation failed.
    """
    from torch._inductor import aoti_compile_and_package

    package = folder / "model.pt2"
    options = {"cpp.threads": 1}  # a rank has one thread, and callers bring their own
    try:
        with _quiet("torch._inductor"):
            aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
    except Exception as error:  # of any kind
        raise CompileError(f"AOTInductor: {_first_line(error)}") from error
    with zipfile.ZipFile(package) as files:
        libraries = [file for file in files.infolist() if file.filename.endswith(".so")]
        if len(libraries) != 1 or libraries[0].file_size > MAX_CODE_BYTES:
            raise CompileError(f"AOTInductor wrote {len(libraries)} libraries")
        if any(file.filename.endswith("_weights.blob") for file in files.infolist()):
            raise CompileError("the weights are too large to lie in the library")
        return files.read(libraries[0])


def torch_abi() -> int:
    """Return the version of PyTorch as its libtorch reports it: 2.13.0 is 0x020d00."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", torch.__version__)
    assert numbers is not None
    major, minor, patch = map(int, numbers.groups())
    return major << 16 | minor << 8 | patch


def processor() -> dict[str, Any]:
    """Return the architecture and the instructions that compiled code may use."""
    used = sorted(flag for flag in cpu_flags() if FEATURES.fullmatch(flag))
    return {"architecture": platform.machine(), "features": used}


def torch_library() -> str:
    """Return the path of libtorch_cpu.so of the PyTorch that is running."""
    return str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")


# The ONNX Runtime backend's side of the export: the model as ONNX.


class OnnxError(ValueError):
    """The model can't be expressed as ONNX; the message says why."""


def export_onnx(exported: ExportedProgram, spec: ModelSpec) -> bytes:
    """Return the model as ONNX, with the names of ``spec``.

    Raises:
        OnnxError: A package is missing, PyTorch's exporter refuses the model, or ONNX would round
            a number of a float64 model.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise OnnxError(f"{', '.join(missing)} not installed. HINT: pip install 'paceline[export]'")
    inputs, outputs = [x.name for x in spec.inputs], [y.name for y in spec.outputs]
    try:
        with _quiet("torch.onnx"), contextlib.redirect_stdout(io.StringIO()):
            program = torch.onnx.export(
                exported,
                (),
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                optimize=False,  # it would hide which numbers were rounded
            )
            if program is None:
                raise OnnxError("torch.onnx.export returned no model")
            if spec.dtype == "float64":
                _check_numbers(program.model_proto, exported)
            program.optimize()
    except OnnxError:
        raise
    except Exception as error:  # of any kind
        raise OnnxError(f"torch.onnx.export: {_first_line(error)}") from error
    data: bytes = program.model_proto.SerializeToString()
    return data


def _check_numbers(model: Any, exported: ExportedProgram) -> None:
    """Check that ONNX rounds no number of a float64 model.

    Attributes of operators are float32, as the slope of LeakyRelu and the epsilon of
    normalizations, and PyTorch's exporter writes some other numbers so, as the bounds of clamp.
    A number is taken for rounded if one of the model's numbers was rounded to it, or if it is that
    float32 which lies next to a short decimal number, as 0.01.

    Raises:
        OnnxError: It rounds one.
    """
    rounded = {float(np.float32(x)): x for x in _numbers(exported) if float(np.float32(x)) != x}
    for operator, stored in _float32_numbers(model):
        shortest = float(str(np.float32(stored)))
        meant = rounded.get(stored, shortest)
        if meant != stored and not np.isnan(stored):
            raise OnnxError(
                f"ONNX stores the number {meant!r} of {operator} in float32, as {stored:.17g}"
            )


def _numbers(exported: ExportedProgram) -> Iterator[float]:
    """Yield the numbers that are arguments of operators."""

    def inside(value: Any) -> Iterator[float]:
        if isinstance(value, float):
            yield value
        elif isinstance(value, list | tuple):
            for each in value:
                yield from inside(each)

    for node in exported.graph.nodes:
        yield from inside([*node.args, *node.kwargs.values()])


def _float32_numbers(model: Any) -> Iterator[tuple[str, float]]:
    """Yield the single numbers that an ONNX model holds in float32, and where."""
    from onnx import AttributeProto, TensorProto, numpy_helper

    def in_graph(graph: Any) -> Iterator[tuple[str, float]]:
        users = {name: node for node in graph.node for name in node.input}

        def user_of(name: str) -> str:
            while name in users and users[name].op_type in ("Cast", "CastLike"):
                name = users[name].output[0]
            return users[name].op_type if name in users else "an output"

        for node in graph.node:
            constant = node.op_type == "Constant"
            where = user_of(node.output[0]) if constant else node.op_type
            for attribute in node.attribute:
                if attribute.type == AttributeProto.FLOAT:
                    yield where, attribute.f
                elif attribute.type == AttributeProto.FLOATS:
                    yield from ((where, x) for x in attribute.floats)
                elif attribute.type == AttributeProto.TENSOR:
                    yield from in_tensor(where, attribute.t)
                elif attribute.type == AttributeProto.GRAPH:
                    yield from in_graph(attribute.g)
        for tensor in getattr(graph, "initializer", ()):  # functions have none
            yield from in_tensor(user_of(tensor.name), tensor)

    def in_tensor(where: str, tensor: Any) -> Iterator[tuple[str, float]]:
        if tensor.data_type == TensorProto.FLOAT and np.prod(tensor.dims, initial=1) == 1:
            yield where, float(numpy_helper.to_array(tensor).reshape(()))

    for graph in (model.graph, *model.functions):
        yield from in_graph(graph)


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Print no warnings, and no messages of a logger."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def onnxruntime_library() -> str:
    """Return the path of ONNX Runtime's library in its Python package; "" without one."""
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found.submodule_search_locations or []) if found else []:
        if libraries := sorted(Path(folder, "capi").glob("libonnxruntime.so*")):
            return str(libraries[-1])
    return ""
