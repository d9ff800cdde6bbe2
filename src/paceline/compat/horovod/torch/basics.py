"""Ranks, nodes and what the library was built with: the first part of ``horovod.torch.mpi_ops``."""

from .. import timeline
from ..core import world
from ..core.built import ccl_built as ccl_built
from ..core.built import cuda_built as cuda_built
from ..core.built import ddl_built as ddl_built
from ..core.built import gloo_built as gloo_built
from ..core.built import mpi_built as mpi_built
from ..core.built import nccl_built as nccl_built
from ..core.built import rocm_built as rocm_built
from ..core.requests import ReduceOp
from ..core.world import init as init
from ..core.world import is_initialized as is_initialized

# All interfaces have these names. Each has an ``init`` of its own.
__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def shutdown() -> None:
    """Leave the world; unfinished operations of the other ranks fail. ``init`` may follow."""
    world.shutdown()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a timeline, which rank 0 writes; it ends the one that is being written.

    Raises:
        ValueError: Before ``init``, or rank 0 can't write the file.
    """
    if world.current_world().rank == 0:
        timeline.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline. Raises ValueError before ``init``."""
    world.current_world()
    timeline.stop_timeline()


def rank() -> int:
    """Return the global rank of this process. Raises ValueError before ``init``."""
    return world.current_world().rank


def size() -> int:
    """Return the number of ranks. Raises ValueError before ``init``."""
    return world.current_world().size


def local_rank() -> int:
    """Return the rank within the node. Raises ValueError before ``init``."""
    return world.current_world().local_rank


def local_size() -> int:
    """Return the number of ranks on the node. Raises ValueError before ``init``."""
    return world.current_world().local_size


def cross_rank() -> int:
    """Return the number of the node among those that have this local rank.

    Raises ValueError before ``init``.
    """
    return world.current_world().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have this local rank. Raises ValueError before ``init``."""
    return world.current_world().cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks. Raises ValueError before ``init``."""
    return world.current_world().is_homogeneous


def mpi_threads_supported() -> bool:
    """Raise ValueError: MPI is not used."""
    raise ValueError(
        "Horovod MPI is not enabled: Paceline exchanges without MPI. HINT: call mpi4py in the main "
        "thread only, or if hvd.mpi_enabled()"
    )


def mpi_enabled() -> bool:
    """Return False: ranks exchange over shared memory, TCP and NCCL."""
    return False


def gloo_enabled() -> bool:
    """Return True: scripts that ask which controller runs get the one without MPI."""
    return True
