"""The AOTInductor backend's side of the export: the model compiled to machine code."""

import logging
import platform
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

# Of the flags in /proc/cpuinfo, those that the compiler may have used with -march=native.
FEATURES = re.compile(
    r"(avx|amx|sse|ssse|fma|bmi|f16c|abm|adx|popcnt|movbe|gfni|vaes|vpclmul|asimd|sve|fphp|bf16|i8mm)\w*"
)
MAX_CODE_BYTES = 1 << 30


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
    log = logging.getLogger("torch._inductor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
    except Exception as error:  # of any kind
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:200] if lines else type(error).__name__
        raise CompileError(f"AOTInductor: {reason}") from error
    finally:
        log.setLevel(level)
    with zipfile.ZipFile(package) as files:
        libraries = [one for one in files.infolist() if one.filename.endswith(".so")]
        if len(libraries) != 1 or libraries[0].file_size > MAX_CODE_BYTES:
            raise CompileError(f"AOTInductor wrote {len(libraries)} libraries")
        if any(one.filename.endswith("_weights.blob") for one in files.infolist()):
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
    words: list[str] = []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            words = line.partition(":")[2].split()
            break
    used = sorted({word for word in words if FEATURES.fullmatch(word)})
    return {"architecture": platform.machine(), "features": used}


def torch_library() -> str:
    """Return the path of libtorch_cpu.so of the PyTorch that is running."""
    return str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
