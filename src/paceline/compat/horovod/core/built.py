"""What the library was built with: Horovod's names, answered for Paceline's exchange."""

from typing import Any

import torch


def mpi_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return True."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL as Horovod does (2.27.3 as 22703), or 0 if torch has none."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version: Any = torch.cuda.nccl.version()
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm."""
    return torch.version.hip is not None
