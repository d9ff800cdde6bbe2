"""Programs in C, C++ and Fortran call an exported model."""

import os
import shutil
import subprocess
from pathlib import Path

import exported_models as models
import pytest
from exported_models import export
from typer.testing import CliRunner

from paceline.cli import app
from paceline.deploy.native_model import LIBRARY_PATH, NATIVE

PROGRAMS = Path(__file__).parent / "programs"
COMPILERS = {
    "c": ("gcc", "-std=c11"),
    "c++": ("g++", "-std=c++17"),
    "fortran": ("gfortran", "-std=f2008"),
}
LIBRARIES = {"c": ["-lm", "-lpthread"], "c++": [], "fortran": []}


def compiler_of(language):
    found = shutil.which(COMPILERS[language][0])
    if found is None:
        pytest.skip(f"no {COMPILERS[language][0]}. HINT: make test-packages")
    return found


def flags(language):
    result = CliRunner().invoke(app, ["export", "--show-build-flags", language])
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("scale") / "scale.paceline"
    export(models.scale(), path, "x: float64[batch,3]", bounds={"batch": (1, 400)})
    return path


@pytest.mark.parametrize(
    ("language", "source"), [("c", "scale.c"), ("c++", "scale.cpp"), ("fortran", "scale.f90")]
)
def test_program_calls_the_model(tmp_path, model, language, source):
    command = [compiler_of(language), COMPILERS[language][1], "-O1", "-Wall", "-Wextra", "-Werror"]
    own = [str(PROGRAMS / source), "-o", "program"]
    if language == "fortran":
        *module, link_folder, rpath, library = flags(language)
        own = [*module, str(PROGRAMS / source), "-o", "program", link_folder, rpath, library]
    else:
        own += [*flags(language), *LIBRARIES[language]]
    built = subprocess.run([*command, *own], cwd=tmp_path, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "program", model], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize(
    "capped", [pytest.param("-DPACELINE_PLAIN", marks=pytest.mark.long), "-DPACELINE_AVX2"]
)
def test_library_for_processors_without_wide_vectors(tmp_path, model, capped):
    """Built by the script that users have, in a copy of the runtime."""
    compiler = compiler_of("c")
    runtime = tmp_path / "runtime"
    result = CliRunner().invoke(app, ["export", "--copy-runtime", str(runtime)])
    assert result.exit_code == 0, result.output
    env = {**os.environ, "CC": compiler}
    subprocess.run(
        ["sh", runtime / "build.sh", "-Wall", "-Wextra", "-Werror", capped], check=True, env=env
    )
    program = tmp_path / "program"
    library = runtime / "lib"
    command = [
        compiler,
        PROGRAMS / "scale.c",
        "-o",
        program,
        f"-I{runtime / 'include'}",
        f"-L{library}",
    ]
    subprocess.run([*command, f"-Wl,-rpath,{library}", "-lpaceline", *LIBRARIES["c"]], check=True)
    assert subprocess.run([program, model], capture_output=True).stdout == b"right\n"


def test_pkg_config_finds_the_library(tmp_path):
    found = shutil.which("pkg-config")
    if found is None:
        pytest.skip("no pkg-config. HINT: make test-packages")
    env = {**os.environ, "PKG_CONFIG_PATH": str(NATIVE / "lib" / "pkgconfig")}
    text = subprocess.run(
        [found, "--cflags", "--libs", "paceline"], capture_output=True, text=True, env=env
    ).stdout
    words = {word for word in text.split() if word[:2] in ("-I", "-L")}
    assert {os.path.realpath(word[2:]) for word in words} == {
        str(NATIVE / "include"),
        str(NATIVE / "lib"),
    }
    assert "-lpaceline" in text.split()


@pytest.mark.long
def test_cmake_package_builds_c_and_fortran(tmp_path, model):
    if shutil.which("cmake") is None:
        pytest.skip("no cmake. HINT: make test-packages")
    compiler_of("fortran")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(solver C Fortran)\n"
        "find_package(paceline CONFIG REQUIRED)\n"
        f"add_executable(in_c {PROGRAMS / 'scale.c'})\n"
        "target_link_libraries(in_c PRIVATE paceline::paceline m pthread)\n"
        f"add_executable(in_fortran {PROGRAMS / 'scale.f90'})\n"
        "target_link_libraries(in_fortran PRIVATE paceline::paceline_fortran)\n"
    )
    build = tmp_path / "build"
    for words in (
        ["-S", tmp_path, "-B", build, f"-Dpaceline_DIR={NATIVE / 'lib/cmake/paceline'}"],
        ["--build", build],
    ):
        done = subprocess.run(["cmake", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("in_c", "in_fortran"):
        assert subprocess.run([build / name, model], capture_output=True).stdout == b"right\n"


def test_library_needs_neither_python_nor_torch():
    text = subprocess.run(["readelf", "-d", LIBRARY_PATH], capture_output=True, text=True).stdout
    needed = [line.split("[")[1].split(".so")[0] for line in text.splitlines() if "NEEDED" in line]
    assert set(needed) <= {
        "libm",
        "libc",
        "libdl",
        "libpthread",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }
