"""Flags of compilers for programs that call a model."""

import shutil
from pathlib import Path

from .native_model import LIBRARY_PATH, NATIVE

LANGUAGES = ("c", "c++", "fortran", "prefix")


def build_flags(language: str) -> str:
    """Return what a compiler needs beside the source file; for Fortran also the module's source.

    Raises:
        ValueError: The language is unknown, or the library was not built.
    """
    if language not in LANGUAGES:
        raise ValueError(f"unknown language {language}. HINT: {', '.join(LANGUAGES)}")
    if not LIBRARY_PATH.exists():
        raise ValueError(
            f"{LIBRARY_PATH} does not exist. HINT: install a C compiler, then run {NATIVE}/build.sh"
        )
    if language == "prefix":
        return str(NATIVE)
    link = f"-L{NATIVE}/lib -Wl,-rpath,{NATIVE}/lib -lpaceline"
    if language == "fortran":
        return f"{NATIVE}/fortran/paceline.f90 {link}"
    return f"-I{NATIVE}/include {link}"


def copy_runtime(folder: Path) -> None:
    """Copy library, headers, sources and build files to a new folder, for nodes without Python.

    Raises:
        ValueError: The folder exists, or the library was not built.
        OSError: It can't be written.
    """
    build_flags("prefix")
    if folder.exists():
        raise ValueError(f"{folder} exists. HINT: choose a new folder")
    shutil.copytree(NATIVE, folder, ignore=shutil.ignore_patterns("__pycache__"))
