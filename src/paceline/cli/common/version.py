"""What ``paceline --version --verbose`` prints: the facts that a bug report needs."""

import os
import platform
from importlib import metadata
from pathlib import Path

from ...security.processes import find_program
from ...security.text import printable

PACKAGES = ("numpy", "lightning", "accelerate", "transformers", "nvidia-dali-cuda130", "h5py")
SCHEDULER_COMMANDS = ("sbatch", "bsub", "qsub", "flux", "mpirun", "mpiexec")


def environment_lines() -> list[str]:
    """Return lines of ``name: value``: versions, build of PyTorch, backends, scheduler."""
    facts = {
        "python": f"{platform.python_version()} ({platform.platform()})",
        **_torch(),
        **{name: version for name in PACKAGES if (version := _version(name))},
        "kernels of the exchange": _kernels(),
        "scheduler": _scheduler(),
        "commands": ", ".join(filter(find_program, SCHEDULER_COMMANDS)) or "no launcher in PATH",
    }
    return [f"{name}: {printable(value)}" for name, value in facts.items()]


def _torch() -> dict[str, str]:
    try:
        import torch
        import torch.distributed as dist

        from ...study.probe.measure.torch_build import library_versions, torch_build
    except Exception as error:  # a broken installation is what a bug report is about
        return {"torch": f"cannot be imported: {type(error).__name__}: {error}"}
    build = torch_build()
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "vector instructions": f"{build.get('capability', 'unknown')} in use, "
        f"{build.get('processor', 'unknown')} in the processor",
        "blas": build.get("blas", "unknown"),
        "libraries": ", ".join(f"{name} {one}" for name, one in library_versions().items()),
        "backends": ", ".join(name for name, there in backends.items() if there) or "none",
        "gpus": str(gpus),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _kernels() -> str:
    comm = Path(__file__).parents[2] / "comm"
    missing = [one for one in ("shared/kernel.so", "hosts/wire.so") if not (comm / one).exists()]
    return f"{', '.join(missing)} not compiled" if missing else "compiled"


def _scheduler() -> str:
    from ...cluster.schedulers.detect import find_allocation

    try:
        found = find_allocation(dict(os.environ))
    except ValueError as error:
        return str(error)
    return "no allocation" if found is None else f"{found.scheduler} job {found.job}"
