"""Programs in C and C++ that the benchmarks of `paceline export` run, and the models they call."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import SCRIPTS

from paceline.deploy.export import BACKENDS, ExportError, ExportResult, export_model
from paceline.deploy.model_file import compile_model, onnxruntime_library, torch_library
from paceline.deploy.native_model import build_flags
from paceline.deploy.specification import TensorSpec

SOURCES = SCRIPTS / "deploy"
sys.path.insert(0, str(SOURCES))
from models import build  # noqa: E402  after its folder is on the path


def build_program(name: str, folder: Path) -> Path:
    """Compile a C program of ``scripts/deploy`` that calls a model. Return its path."""
    program = folder / name
    command = ["gcc", "-O2", "-std=gnu11", str(SOURCES / f"{name}.c"), "-o", str(program)]
    _compile([*command, *build_flags("c").split(), "-lm", "-lpthread", "-ldl"])
    return program


def build_aotinductor_program(folder: Path) -> Path:
    """Compile the program that calls AOTInductor by libtorch alone; it takes half a minute."""
    program, name = folder / "aotinductor_by_hand", "aotinductor_by_hand.cpp"
    torch_folder = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    command = ["g++", "-O2", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(SOURCES / name)]
    headers = ["include", "include/torch/csrc/api/include"]
    command += [f"-I{torch_folder / one}" for one in headers]
    library = torch_folder / "lib"
    command += [f"-L{library}", f"-Wl,-rpath,{library}", "-Wl,--no-as-needed"]
    _compile([*command, "-ltorch_cpu", "-ltorch", "-lc10", "-o", str(program)])
    return program


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr[:4000]}\n{' '.join(command)}")


def run_json(*command: object) -> dict[str, Any]:
    """Run a program that prints one JSON object, with the libraries of this Python."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PACELINE_ONNXRUNTIME": onnxruntime_library(),
        "PACELINE_LIBTORCH": torch_library(),
    }
    words = [str(one) for one in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{done.stderr[-2000:]}\nexit code {done.returncode} of: {' '.join(words)}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def export(name: str, dtype: str, folder: Path, backend: str = "") -> ExportResult | str:
    """Export a model of ``scripts/deploy/models.py`` as NAME-DTYPE-BACKEND.paceline, or NAME-DTYPE
    with the best backend. Return the reason where that is not possible."""
    model, shape = build(name)
    file = folder / f"{name}-{dtype}{'-' * bool(backend)}{backend}.paceline"
    backends = [backend] if backend else BACKENDS
    try:
        return export_model(
            model, [TensorSpec("x", ("batch", *shape))], dtype, file, backends=backends
        )
    except ExportError as error:
        return str(error).splitlines()[1].strip()


def export_by_hand(name: str, dtype: str, folder: Path, backend: str) -> None:
    """Write NAME-DTYPE.onnx or NAME-DTYPE.pt2 with PyTorch's own functions."""
    model, shape = build(name)
    model = model.to(getattr(torch, dtype))
    example = torch.randn(5, *shape, dtype=getattr(torch, dtype))
    dims = ({0: torch.export.Dim("batch", min=1, max=1 << 24)},)
    with torch.no_grad():
        exported = torch.export.export(model, (example,), dynamic_shapes=dims)
        if backend == "onnxruntime":
            names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
            program = torch.onnx.export(exported, (), dynamo=True, verbose=False, **names)
            assert program is not None
            program.save(str(folder / f"{name}-{dtype}.onnx"))
        elif backend == "aotinductor":
            compile_model(exported, folder)  # the options of paceline export
            (folder / "model.pt2").rename(folder / f"{name}-{dtype}.pt2")
