"""The library under valgrind and sanitizers, from 16 threads, and over many calls."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import exported_models as models
import pytest
from exported_models import export

from paceline.deploy.model_file import onnxruntime_library
from paceline.deploy.native_model import build_flags, copy_runtime

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "benchmarks/scripts/deploy/calls.c"
SCALE = Path(__file__).parent / "programs" / "scale.c"
SHAPES = {"mlp": "6", "Net": "3,8,8", "Attention": "7,16"}
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


def program_of(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}. HINT: make test-packages")
    return found


def compiled(source, folder, *flags):
    command = [program_of("gcc"), "-std=gnu11", "-O1", "-g", source, "-o", folder / "program"]
    done = subprocess.run([*command, *flags, "-lm", "-lpthread"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "program"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The models, with the builtin backend."""
    folder = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        export(getattr(models, name)(), folder / name, f"x: float32[batch,{shape}]")
    export(models.scale(), folder / "scale", "x: float64[batch,3]", bounds={"batch": (1, 400)})
    return folder


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    return compiled(CALLS, tmp_path_factory.mktemp("calls"), *build_flags("c").split())


def result_of(*command, **environment):
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_calls_of_16_threads_have_the_results_of_one(files, calls):
    for name in SHAPES:
        found = result_of(calls, "check", files / name, 9, 100, 16)
        assert (found["backend"], found["different"], found["time_of_others_s"]) == (
            "builtin",
            0,
            0,
        )


@pytest.mark.long
def test_calls_of_16_threads_of_onnx_runtime_have_the_results_of_one(calls, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    for name, shape in SHAPES.items():
        inputs = f"x: float32[batch,{shape}]"
        export(getattr(models, name)(), tmp_path / name, inputs, backends=["onnxruntime"])
        library = {"PACELINE_ONNXRUNTIME": onnxruntime_library()}
        found = result_of(calls, "check", tmp_path / name, 9, 500, 16, **library)
        assert (found["backend"], found["different"], found["time_of_others_s"]) == (
            "onnxruntime",
            0,
            0,
        )


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_calls(files, calls):
    found = result_of(calls, "check", files / "mlp", 3, 1_000_000, 1)
    assert found["different"] == 0
    assert found["memory_growth_mib"] < 0.25


@pytest.mark.long
def test_valgrind_finds_no_errors_in_10_000_calls(files, calls):
    valgrind = program_of("valgrind")
    options = ["-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"]
    for name, number in (("mlp", 10_000), ("Net", 100), ("Attention", 500)):
        found = result_of(valgrind, *options, calls, "check", files / name, 3, number, 1)
        assert found["different"] == 0


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The runtime of users, built with sanitizers; and flags for programs."""
    folder = tmp_path_factory.mktemp("sanitized") / "runtime"
    copy_runtime(folder)
    env = {**os.environ, "CC": program_of("gcc")}
    done = subprocess.run(
        ["sh", folder / "build.sh", *SANITIZE], capture_output=True, text=True, env=env
    )
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip("gcc has no sanitizers. HINT: make test-packages")
    assert done.returncode == 0, done.stderr
    place = f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"
    return [*SANITIZE, f"-I{folder}/include", *place, "-lpaceline"]


@pytest.mark.long
def test_sanitizers_find_no_errors_in_10_000_calls(files, sanitized, tmp_path):
    program = compiled(CALLS, tmp_path, *sanitized)
    for name, number in (("mlp", 10_000), ("Net", 2_000), ("Attention", 2_000)):
        assert result_of(program, "check", files / name, 3, number, 1)["different"] == 0


@pytest.mark.long
def test_sanitizers_find_no_errors_in_wrong_calls_and_threads(files, sanitized, tmp_path):
    """The program makes all kinds of wrong calls, then calls from 16 threads."""
    program = compiled(SCALE, tmp_path, *sanitized)
    done = subprocess.run([program, files / "scale"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-4000:]
