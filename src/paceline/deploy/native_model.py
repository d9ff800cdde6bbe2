"""Python interface to libpaceline.so (``native/``), the C library that runs exported models.

It runs a model file as a solver does, and returns the compiler flags for programs that use it.
"""

import ctypes
import os
import shutil
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

import torch

NATIVE = Path(__file__).parent / "native"
LIBRARY_PATH = NATIVE / "lib" / "libpaceline.so"
LANGUAGES = ("c", "c++", "fortran", "prefix")
# Values of native/include/paceline.h, as the structures below are.
DTYPE_CODES = {"float32": 1, "float64": 2}
UNKNOWN_DTYPE = 0  # refused by the library, with an error message
CHECK_FINITE, CONVERT = 1, 2  # flags of paceline_options


class _Options(ctypes.Structure):
    _fields_ = [("bytes", c_size_t), ("flags", c_uint), ("threads", c_int), ("library", c_char_p)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int),
        ("rank", c_int),  # number of dims
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
        ValueError: The library can't be loaded, as it was not built: the installation found no C
            compiler.
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
        path: File written by ``paceline export``.
        check_finite: Whether each call checks inputs and outputs for NaN and infinity.
        convert: Whether tensors of the other dtype are converted instead of refused.
        threads: Threads of ONNX Runtime or libtorch; 0: one. The builtin backend uses one.
        library_path: Path of ONNX Runtime or libtorch, for the backends that need it.

    Raises:
        NativeModelError: The file can't be used; the message names the reason.
        ValueError: The library can't be loaded.
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
        flags = (CHECK_FINITE if check_finite else 0) | (CONVERT if convert else 0)
        runtime = os.fsencode(library_path) or None
        options = _Options(ctypes.sizeof(_Options), flags, threads, runtime)
        self._check(
            self._library.paceline_load(
                os.fsencode(path), ctypes.byref(options), ctypes.byref(self._model)
            )
        )

    def _check(self, code: int) -> None:
        if code:
            name = self._library.paceline_error_name(code).decode()
            message = self._library.paceline_last_error().decode(errors="replace")
            raise NativeModelError(name, message)

    @property
    def backend(self) -> str:
        """Name of the backend that runs the model."""
        return str(self._library.paceline_backend(self._model).decode())

    def describe(self) -> str:
        """Return the manifest of the model file as JSON."""
        return str(self._library.paceline_describe(self._model).decode())

    def test(self) -> float:
        """Run the file's test vectors, and return the largest error relative to the largest output.

        Raises:
            NativeModelError: The error exceeds the tolerance, or the model can't be run.
        """
        error = c_double()
        self._check(self._library.paceline_test(self._model, ctypes.byref(error)))
        return error.value

    def measure(self, number: int, seconds: float) -> float:
        """Return the median seconds of a call on test vectors.

        Args:
            number: Number of the test vectors in the file.
            seconds: Approximate duration of the measurement.
        """
        per_call = c_double()
        self._check(
            self._library.paceline_measure(self._model, number, seconds, ctypes.byref(per_call))
        )
        return per_call.value

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs`` from ``inputs``. Tensors are on the CPU, with any strides.

        Raises:
            NativeModelError: Number, dtypes or shapes of the tensors do not fit the model.
            ValueError: A tensor is not on the CPU.
        """
        alive: list[object] = []  # until the call has ended
        ins, outs = _tensor_array(inputs, alive), _tensor_array(outputs, alive)
        self._check(self._library.paceline_run(self._model, ins, len(inputs), outs, len(outputs)))

    def close(self) -> None:
        """Free the model. Later calls of ``run``, ``test`` and ``measure`` raise an error."""
        if self._model:
            self._library.paceline_free(self._model)
            self._model = c_void_p()

    def __enter__(self) -> "NativeModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensor_array(tensors: Sequence[torch.Tensor], alive: list[object]) -> "ctypes.Array[_Tensor]":
    """Return the C structures of tensors; append to ``alive`` what their pointers refer to."""
    array = (_Tensor * max(1, len(tensors)))()  # C has no arrays of length 0
    for entry, tensor in zip(array, tensors, strict=False):
        if tensor.device.type != "cpu":  # the library would read its address as one of host memory
            raise ValueError(f"a tensor is on {tensor.device}, not on the CPU. HINT: tensor.cpu()")
        shape = (c_int64 * max(1, tensor.dim()))(*tensor.shape)
        strides = (c_int64 * max(1, tensor.dim()))(*tensor.stride())
        alive += [shape, strides]
        dtype = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."), UNKNOWN_DTYPE)
        entry.data, entry.dtype, entry.rank = tensor.data_ptr(), dtype, tensor.dim()
        entry.shape, entry.strides = shape, strides
    return array


def build_flags(language: str) -> str:
    """Return the compiler's arguments for a program that uses the library.

    Args:
        language: One of LANGUAGES. "fortran" includes the source file of the Fortran module;
            "prefix" returns the folder of the library instead of arguments.

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
        OSError: The folder can't be written.
    """
    build_flags("prefix")  # raises ValueError if the library was not built
    if folder.exists():
        raise ValueError(f"{folder} exists. HINT: choose a new folder")
    shutil.copytree(NATIVE, folder, ignore=shutil.ignore_patterns("__pycache__"))
