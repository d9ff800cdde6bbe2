"""ONNX Runtime and AOTInductor behind the same interface."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys

import exported_models as models
import pytest
import torch
from exported_models import export, largest_error
from test_model_file import split
from torch import nn

from paceline.deploy.export import Candidate, ExportError, choose
from paceline.deploy.model_file import encode_model_file, onnxruntime_library
from paceline.deploy.native_model import LIBRARY_PATH, NativeModel, NativeModelError
from paceline.deploy.specification import inputs_of_examples, parse_input


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
    layer = nn.Sequential(nn.Conv2d(3, 2, 3))
    with pytest.raises(ExportError, match=r"onnxruntime: ONNX Runtime: .*Conv"):
        export(layer, tmp_path / "m", "x: float64[batch,3,8,8]", backends=["onnxruntime"])


class Bounds(nn.Module):
    def __init__(self, low, high):
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x):
        return x.clamp(self.low, self.high)


@pytest.mark.parametrize(
    ("layer", "number"),
    [
        (Bounds(-1000.1, 2048.0), "-1000.1 of Max"),  # the test vectors do not come there
        (Bounds(None, 2048 + 2**-30), "2048.0000000009313 of Min"),  # looks exact in float32
        (nn.Hardtanh(-1e-3, 1e-3), "-0.001 of Clip"),
        (nn.LeakyReLU(0.01), "0.01 of LeakyRelu"),
        (nn.ELU(0.3), "0.3 of Elu"),
        (nn.LayerNorm(3), "1e-05 of LayerNormalization"),
        (nn.Hardsigmoid(), "0.16666667 of HardSigmoid"),
    ],
    ids=["clamp", "near a float32", "hardtanh", "slope", "elu", "epsilon", "of the operator"],
)
def test_numbers_that_onnx_rounds_to_float32_are_refused_in_float64(tmp_path, onnx, layer, number):
    text = f"onnxruntime: can't express the model: ONNX stores the number {number}"
    options = {"backends": ["onnxruntime"], "tolerance": 1e-6}
    with pytest.raises(ExportError, match=re.escape(text)):
        export(layer, tmp_path / "onnx", "x: float64[batch,3]", **options)
    path = tmp_path / "builtin"
    export(layer, path, "x: float64[batch,3]")
    for scale in (1, 1e5):
        assert largest_error(layer, path, "float64", (9, 3), scale=scale) < 1e-13


def test_numbers_that_float32_holds_are_exported_in_float64(tmp_path, onnx):
    path, layer = tmp_path / "model.paceline", Bounds(-0.5, 1024.75)
    export(layer, path, "x: float64[batch,3]", backends=["onnxruntime"])
    for scale in (1, 1e5):
        assert largest_error(layer, path, "float64", (9, 3), scale=scale) < 1e-13


class Tokens(nn.Module):
    """An embedding of indices, and a mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, indices, mask):
        chosen = self.embedding(indices.long()) * (mask > 0).unsqueeze(-1)
        return self.head(chosen.sum(1))


def test_indices_and_masks_are_passed_as_floating_point_numbers(tmp_path, onnx):
    with pytest.raises(ValueError, match=r"int64.*HINT: pass indices and masks as float32"):
        inputs_of_examples([torch.zeros(1, 5, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"HINT: pass indices and masks as float32"):
        parse_input("x: int64[batch,5]")
    path, model = tmp_path / "model.paceline", Tokens()
    generator = torch.Generator().manual_seed(0)
    examples = [torch.randint(50, (20, 5), generator=generator).float() for _ in range(2)]
    inputs = ("x: float32[batch,5]", "mask: float32[batch,5]")
    export(model, path, *inputs, examples=examples, backends=["onnxruntime"])
    found = torch.zeros(20, 2)
    with NativeModel(path) as native:
        native.run(examples, [found])
    want = model(*examples)
    assert (found - want).abs().max() < 1e-6 * want.abs().max()


class Coupled(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_fields_of_a_model_that_couples_samples_are_one_batch(tmp_path, onnx):
    """The builtin backend refuses such models, and splits a batch of fields of this size."""
    path = tmp_path / "model.paceline"
    export(Coupled(), path, "x: float64[batch,3]", backends=["onnxruntime"])
    x = torch.randn(3, 20_000, dtype=torch.float64) + torch.linspace(0, 9, 20_000)
    y = torch.zeros_like(x)
    fields = [(ctypes.c_void_p * 3)(*(row.data_ptr() for row in one)) for one in (x, y)]
    with NativeModel(path) as model:
        run = model._library.paceline_run_fields_f64
        assert run(model._model, ctypes.c_int64(20_000), fields[0], None, fields[1], None) == 0
    assert torch.allclose(y, x - x.mean(1, keepdim=True), rtol=1e-12)


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


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "model.paceline"
    return with_backend(path, "onnxruntime", {"onnx": b"x"})


@pytest.mark.parametrize(
    ("place", "open_to_all", "code", "words"),
    [
        ("paceline/deploy/native/lib", "", 10, "has no OrtGetApiBase"),  # it was loaded
        ("paceline/deploy/native/lib", "onnxruntime/capi/libonnxruntime.so", 11, "was not loaded"),
        ("paceline/deploy/native/lib", "onnxruntime/capi", 11, "was not loaded"),
        ("paceline/deploy/native/lib", "onnxruntime", 11, "was not loaded"),
        ("paceline/deploy/native/lib", ".", 11, "was not loaded"),
        ("me/app/rt/lib", "", 10, "was not found"),
    ],
)
def test_libraries_beside_this_one_are_not_trusted(
    tmp_path, onnx_file, place, open_to_all, code, words
):
    """Only those in site-packages are loaded, and none that other users could have written."""
    site = tmp_path / "site"
    for folder, name in ((place, "libpaceline.so"), ("onnxruntime/capi", "libonnxruntime.so")):
        (site / folder).mkdir(parents=True)
        shutil.copy(LIBRARY_PATH, site / folder / name)
    if open_to_all:
        (site / open_to_all).chmod(0o777)
    command = [sys.executable, "-P", "-c", LOAD, site / place / "libpaceline.so", onnx_file]
    env = {k: v for k, v in os.environ.items() if k != "PACELINE_ONNXRUNTIME"}
    said = subprocess.run(command, capture_output=True, text=True, env=env).stdout
    assert said.startswith(f"{code} "), said
    assert words in said


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
