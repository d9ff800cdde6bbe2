"""The ONNX Runtime backend's side of the export: the model as ONNX."""

import contextlib
import importlib.util
import io
import logging
import warnings
from pathlib import Path

import torch
from torch.export import ExportedProgram

from .specification import ModelSpec

NEEDED = ("onnx", "onnxscript", "onnxruntime")


class OnnxError(ValueError):
    """The model can't be expressed as ONNX; the message says why."""


def export_onnx(exported: ExportedProgram, spec: ModelSpec) -> bytes:
    """Return the model as ONNX, with the names of ``spec``.

    Raises:
        OnnxError: A package is missing, or PyTorch's exporter refuses the model.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise OnnxError(f"{', '.join(missing)} not installed. HINT: pip install 'paceline[export]'")
    inputs, outputs = [x.name for x in spec.inputs], [y.name for y in spec.outputs]
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                exported,
                (),
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
            )
    except Exception as error:  # of any kind
        raise OnnxError(f"torch.onnx.export: {_first_line(error)}") from error
    finally:
        log.setLevel(level)
    if program is None:
        raise OnnxError("torch.onnx.export returned no model")
    data: bytes = program.model_proto.SerializeToString()
    return data


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
