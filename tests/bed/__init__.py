"""Test cluster of several hosts with ssh, Slurm and MPI, in namespaces of one machine.

The fixtures ``hosts``, ``slurm`` and ``shared_folder`` are in conftest.py.
"""

from .hosts import Hosts
from .mpi import MPI_VARIABLES, MPIEXEC, MPIRUN, mpiexec, mpirun
from .needs import missing, missing_mpi, missing_slurm
from .slurm import Slurm

__all__ = [
    "MPIEXEC",
    "MPIRUN",
    "MPI_VARIABLES",
    "Hosts",
    "Slurm",
    "missing",
    "missing_mpi",
    "missing_slurm",
    "mpiexec",
    "mpirun",
]
