"""How PyTorch was built, and which of the processor's vector units its kernels use."""

import os
import re
from pathlib import Path
from typing import Any

from ....cluster.topology.topology import cpu_flags, read_sysfs

CAPABILITY_VARIABLE = "ATEN_CPU_CAPABILITY"  # limits what PyTorch uses
# Flags in /proc/cpuinfo that PyTorch requires of a processor, for each capability.
_X86 = (("AVX512", {"avx512vl", "avx512bw", "avx512dq", "fma"}), ("AVX2", {"avx2", "fma"}))
_SVE256_BYTES = "32"
_BLAS = {"mkl": "MKL", "open": "OpenBLAS", "nvpl": "NVPL", "accelerate": "Accelerate"}


def torch_build(root: Path = Path("/")) -> dict[str, str]:
    """Return what PyTorch uses on this host; keys without a known value are left out.

    capability: Vector instructions of PyTorch's own kernels, such as "AVX2".
    processor: The same, of the processor.
    limited_by: ATEN_CPU_CAPABILITY, if it is set.
    blas: Library of matrix products on the CPU.
    """
    import torch

    found = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_capability(root),
        "limited_by": os.environ.get(CAPABILITY_VARIABLE, ""),
        "blas": blas(torch.__config__.show()),
    }
    return {name: value for name, value in found.items() if value}


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that PyTorch uses: MKL, oneDNN, CUDA, cuDNN, NCCL."""
    import torch

    found = library_versions_in(torch.__config__.show())
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if cudnn:
        found["cudnn"] = _cudnn(cudnn)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    return found


def processor_capability(root: Path = Path("/")) -> str:
    """Return the processor's vector instructions, in PyTorch's words; empty if unknown."""
    flags = cpu_flags(root)
    wide = read_sysfs(root / "proc/sys/abi/sve_default_vector_length") == _SVE256_BYTES
    if "sve" in flags and wide:
        return "SVE256"
    return next((name for name, needed in _X86 if needed <= flags), "DEFAULT") if flags else ""


def blas(config: str) -> str:
    """Return the BLAS library of ``torch.__config__.show()``; empty if it names none."""
    found = re.search(r"\bBLAS_INFO=(\w+)", config)
    return _BLAS.get(found[1].lower(), found[1]) if found else ""


def library_versions_in(config: str) -> dict[str, str]:
    """Return the versions that ``torch.__config__.show()`` reports."""
    patterns = {
        "mkl": r"Math Kernel Library Version (\d[\w.]*)",
        "openblas": r"OpenBLAS (\d[\w.]*)",
        "onednn": r"(?:MKL-DNN|oneDNN) v(\d[\w.]*)",
    }
    found = {name: re.search(pattern, config) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in found.items() if match}


def _cudnn(number: int) -> str:
    """Return the version as text: 90100 is 9.1.0, and 8902 is 8.9.2."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
