"""Requirements of the test cluster that this machine lacks, as text."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from .mpi import MPIEXEC, MPIRUN

PRIVATE = ("/tmp", "/dev/shm", "/run")  # separate on each host

_HOSTS = {
    "openssh-server": ["sshd"],
    "openssh-client": ["ssh", "ssh-keygen"],
    "iproute2": ["ip"],
    "util-linux": ["unshare", "nsenter", "setpriv", "mount"],
    "hostname": ["hostname"],
    "procps": ["pkill"],
}
_SLURM = {
    "munge": ["munged"],
    "slurmctld": ["slurmctld"],
    "slurmd": ["slurmd"],
    "slurm-client": ["srun", "sbatch", "scontrol"],
    "slurm-wlm-torque": ["qsub", "qstat"],
}
_MPI = {"openmpi-bin": [MPIRUN], "mpich": [MPIEXEC]}


@cache
def _missing_hosts() -> tuple[str, ...]:
    if os.geteuid() != 0:
        return ("root",)
    absent = _absent(_HOSTS)
    if not absent and not _may_unshare():
        absent.append("the right to make namespaces (in a container: --privileged)")
    return tuple(absent)


def hidden() -> list[str]:
    """Return the checkout and its virtual environment if they are below a PRIVATE folder."""
    checkout, environment = Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()
    found = [checkout] if environment.is_relative_to(checkout) else [checkout, environment]
    return [str(p) for p in found if any(p.is_relative_to(folder) for folder in PRIVATE)]


def missing() -> list[str]:
    return list(_missing_hosts())


def missing_slurm() -> list[str]:
    return missing() + _absent(_SLURM)


def missing_mpi() -> list[str]:
    return missing() + _absent(_MPI)


def _absent(packages: dict[str, list[str]]) -> list[str]:
    places = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [
        package
        for package, commands in packages.items()
        if not all(shutil.which(command, path=places) for command in commands)
    ]


def _may_unshare() -> bool:
    command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0
