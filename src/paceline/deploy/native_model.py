"""The library that solvers call (``native/``): a model file in Python, and flags of compilers."""

import ctypes
import shutil
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

import torch

NATIVE = Path(__file__).parent / "native"
LIBRARY_PATH = NATIVE / "lib" / "libpaceline.so"
LANGUAGES = ("c", "c++", "fortran", "prefix")
CODES = {"float32": 1, "float64": 2}


class _Options(ctypes.Structure):
    _fields_ = [("bytes", c_size_t), ("flags", c_uint), ("threads", c_int), ("library", c_char_p)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("rank", c_int),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
    ]


class NativeModelError(ValueError):
    """The library reported an error.

    Attributes:
        code: Name of the error code in paceline.h.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@cache
def library() -> ctypes.CDLL:
    """Load the library and declare its functions.

    Raises:
        ValueError: It was not built, as there was no C compiler at the installation.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise ValueError(
            f"{LIBRARY_PATH} can't be loaded: {error}. HINT: install a C compiler, then run "
            f"{NATIVE / 'build.sh'}"
        ) from None
    signatures = {
        "load": (c_int, c_char_p, POINTER(_Options), POINTER(c_void_p)),
        "free": (None, c_void_p),
        "last_error": (c_char_p,),
        "error_name": (c_char_p, c_int),
        "version": (c_char_p,),
        "describe": (c_char_p, c_void_p),
        "backend": (c_char_p, c_void_p),
        "run": (c_int, c_void_p, POINTER(_Tensor), c_int, POINTER(_Tensor), c_int),
        "test": (c_int, c_void_p, POINTER(c_double)),
        "measure": (c_int, c_void_p, c_int, c_double, POINTER(c_double)),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(loaded, f"paceline_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class NativeModel:
    """A loaded model file.

    Args:
        library_path: Path of ONNX Runtime or libtorch, where the backend needs one.

    Raises:
        NativeModelError: The file can't be used; the message says why.
    """

    def __init__(
        self,
        path: Path,
        *,
        check_finite: bool = False,
        convert: bool = False,
        threads: int = 0,
        library_path: str = "",
    ) -> None:
        self._library, self._model = library(), c_void_p()
        flags = (1 if check_finite else 0) | (2 if convert else 0)
        place = library_path.encode() or None
        options = _Options(ctypes.sizeof(_Options), flags, threads, place)
        self._check(
            self._library.paceline_load(
                str(path).encode(), ctypes.byref(options), ctypes.byref(self._model)
            )
        )

    def _check(self, code: int) -> None:
        if code:
            name = self._library.paceline_error_name(code).decode()
            message = self._library.paceline_last_error().decode(errors="replace")
            raise NativeModelError(name, message)

    @property
    def backend(self) -> str:
        return str(self._library.paceline_backend(self._model).decode())

    def describe(self) -> str:
        """Return the manifest as JSON."""
        return str(self._library.paceline_describe(self._model).decode())

    def test(self) -> float:
        """Run the test vectors; return the largest error relative to the largest output."""
        error = c_double()
        self._check(self._library.paceline_test(self._model, ctypes.byref(error)))
        return error.value

    def measure(self, number: int, seconds: float) -> float:
        """Return the median seconds of a call on the test vectors ``number``."""
        per_call = c_double()
        self._check(
            self._library.paceline_measure(self._model, number, seconds, ctypes.byref(per_call))
        )
        return per_call.value

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs``, tensors of any strides on the CPU, from ``inputs``."""
        keep: list[object] = []
        ins, outs = _tensors(inputs, keep), _tensors(outputs, keep)
        self._check(self._library.paceline_run(self._model, ins, len(inputs), outs, len(outputs)))

    def close(self) -> None:
        if self._model:
            self._library.paceline_free(self._model)
            self._model = c_void_p()

    def __enter__(self) -> "NativeModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors(tensors: Sequence[torch.Tensor], keep: list[object]) -> "ctypes.Array[_Tensor]":
    made = (_Tensor * max(1, len(tensors)))()
    for into, tensor in zip(made, tensors, strict=False):
        shape = (c_int64 * max(1, tensor.dim()))(*tensor.shape)
        strides = (c_int64 * max(1, tensor.dim()))(*tensor.stride())
        keep += [shape, strides]
        dtype = CODES.get(str(tensor.dtype).removeprefix("torch."), 0)
        into.data, into.dtype, into.rank = tensor.data_ptr(), dtype, tensor.dim()
        into.shape, into.strides = shape, strides
    return made


def build_flags(language: str) -> str:
    """Return the compiler's arguments; for Fortran with the source of the module.

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
