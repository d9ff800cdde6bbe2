"""ONNX Runtime and AOTInductor behind the same interface."""

import json
import os
import shutil
import subprocess
import sys

import exported_models as models
import pytest
import torch
from exported_models import export, largest_error
from test_model_file import split

from paceline.deploy.export import Candidate, ExportError, choose
from paceline.deploy.model_file import encode_model_file
from paceline.deploy.native_model import LIBRARY_PATH, NativeModel, NativeModelError
from paceline.deploy.onnx_model import onnxruntime_library


@pytest.fixture
def onnx(monkeypatch):
    """Let the library find ONNX Runtime as users of C programs do."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    monkeypatch.setenv("PACELINE_ONNXRUNTIME", onnxruntime_library())


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("float64", 1e-13)])
def test_onnx_runtime_equals_eager(tmp_path, onnx, dtype, limit):
    path = tmp_path / "model.paceline"
    result = export(models.mlp(), path, f"x: {dtype}[batch,6]", backends=["onnxruntime"])
    assert result.backend == "onnxruntime"
    for batch in (1, 70):
        assert largest_error(models.mlp(), path, dtype, (batch, 6)) < limit


@pytest.mark.long
def test_several_symbolic_sizes(tmp_path, onnx):
    """Batch and length of a sequence, which the builtin backend does not have."""
    path = tmp_path / "model.paceline"
    model = models.Attention()
    with pytest.raises(ExportError, match="a symbolic size that is not the batch"):
        export(model, path, "x: float32[batch,length,16]")
    export(model, path, "x: float32[batch,length,16]", backends=["onnxruntime"])
    assert largest_error(model, path, "float32", (5, 23, 16)) < 1e-6


@pytest.mark.long
def test_float64_is_refused_where_onnx_runtime_lacks_an_operator(tmp_path, onnx):
    with pytest.raises(ExportError, match=r"onnxruntime: ONNX Runtime: .*Conv"):
        export(models.Net(), tmp_path / "m", "x: float64[batch,3,8,8]", backends=["onnxruntime"])


def with_backend(path, backend, sections, **changes):
    """Write a file of another backend from one of the builtin backend."""
    export(models.mlp(), path, "x: float32[batch,6]")
    manifest, built = split(path.read_bytes())
    manifest |= {"backend": backend, **changes}
    path.write_bytes(encode_model_file(manifest, {**sections, "vectors": built["vectors"]}))
    return path


def load_error(path, **options):
    with pytest.raises(NativeModelError) as caught:
        NativeModel(path, **options)
    return caught.value


LOAD = """
import ctypes, sys
native = ctypes.CDLL(sys.argv[1])
native.paceline_last_error.restype = ctypes.c_char_p
code = native.paceline_load(sys.argv[2].encode(), None, ctypes.byref(ctypes.c_void_p()))
print(code, native.paceline_last_error().decode())
"""


@pytest.mark.parametrize(
    ("backend", "section", "hint"),
    [
        ("onnxruntime", "onnx", "HINT: pip install onnxruntime"),
        ("aotinductor", "aotinductor", "HINT: install the PyTorch of the export"),
    ],
)
def test_missing_library_says_what_to_install(tmp_path, backend, section, hint):
    """In a process that has loaded none, from a copy of the library outside of site-packages."""
    path = with_backend(tmp_path / "model.paceline", backend, {section: b"x"}, **HERE)
    alone = shutil.copy(LIBRARY_PATH, tmp_path)
    for variable, expected in (
        ({}, hint),
        ({f"PACELINE_{name}": "/absent.so" for name in PATHS}, "/absent.so"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", LOAD, alone, path],
            capture_output=True,
            text=True,
            env={**os.environ, **variable},
        )
        code, _, message = done.stdout.partition(" ")
        assert code == "10", done.stderr  # PACELINE_ERROR_LIBRARY
        assert expected in message


PATHS = ("ONNXRUNTIME", "LIBTORCH")
CODE = {"aotinductor": b"x"}
HERE = {"processor": {"architecture": os.uname().machine, "features": []}, "torch_abi": 1}


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"architecture": "riscv64", "features": []}, "another architecture"),
        ({"architecture": os.uname().machine, "features": ["avx9000"]}, "avx9000"),
    ],
)
def test_compiled_for_another_processor(tmp_path, processor, words):
    changes = {**HERE, "processor": processor}
    path = with_backend(tmp_path / "model.paceline", "aotinductor", CODE, **changes)
    error = load_error(path)
    assert error.code == "PACELINE_ERROR_PROCESSOR"
    assert words in str(error)


@pytest.mark.parametrize("place", ["file", "folder"])
def test_compiled_code_that_others_can_write_is_refused(tmp_path, place):
    folder = tmp_path / "shared"
    folder.mkdir()
    path = with_backend(folder / "model.paceline", "aotinductor", CODE, **HERE)
    (path if place == "file" else folder).chmod(0o777)
    assert load_error(path).code == "PACELINE_ERROR_UNSAFE"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Two models that AOTInductor compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    mlp, net = folder / "mlp.paceline", folder / "net.paceline"
    export(models.mlp(), mlp, "x: float64[batch,6]", backends=["aotinductor"])
    torch.manual_seed(3)
    model = models.Net()
    export(model, net, "x: float64[batch,3,8,8]", backends=["aotinductor"])
    return mlp, net, model


@pytest.mark.long
def test_compiled_models_equal_eager_in_float64(compiled):
    mlp, net, model = compiled
    assert largest_error(models.mlp(), mlp, "float64", (1, 6)) < 1e-13
    assert largest_error(model, net, "float64", (9, 3, 8, 8)) < 1e-13
    with NativeModel(mlp) as first, NativeModel(net) as second, NativeModel(mlp) as third:
        assert max(first.test(), second.test(), third.test()) < 1e-13


@pytest.mark.long
def test_compiled_model_of_another_pytorch_is_refused(compiled, tmp_path):
    manifest, sections = split(compiled[0].read_bytes())
    path = tmp_path / "other.paceline"
    path.write_bytes(encode_model_file({**manifest, "torch_abi": 0x010203}, sections))
    error = load_error(path)
    assert error.code == "PACELINE_ERROR_VERSION"
    assert "PyTorch 1.2.3" in str(error)
    assert json.loads(json.dumps(manifest))["needs"].startswith("libtorch")


def test_fewer_needs_win_unless_another_backend_is_clearly_faster():
    builtin, onnx = (
        Candidate("builtin", call_s=[1, 1]),
        Candidate("onnxruntime", call_s=[0.95, 1]),
    )
    assert choose([builtin, onnx]) is builtin
    onnx.call_s = [0.5, 1]
    assert choose([builtin, onnx]) is onnx
    builtin.reason = "error"
    assert choose([builtin]) is None
