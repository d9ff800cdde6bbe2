"""Allocation of a PBS Pro, OpenPBS or Torque job, from its node file."""

import os
from pathlib import Path

from .allocation import Allocation
from .env_numbers import Environment, number
from .hostfile import Host
from .nodefile import read_nodefile


def allocation(environment: Environment) -> Allocation | None:
    job = environment.get("PBS_JOBID")
    if not job or not environment.get("PBS_NODEFILE"):
        return None
    lines = read_nodefile(environment, "PBS_NODEFILE")
    # PBS Pro writes one line per host if the job did not request processes (mpiprocs).
    asked = max(lines.values()) > 1 or "PBS_NP" in environment or environment.get("NCPUS") == "1"
    cpus = number(environment, "NCPUS") or number(environment, "PBS_NUM_PPN")
    devices = _devices(environment)
    hosts = [
        Host(name, count if asked else None, devices.get(name, 0) if devices else None, cpus)
        for name, count in lines.items()
    ]
    return Allocation("PBS", job, tuple(hosts), "palsrun" if _has_pals(environment) else "ssh")


def _devices(environment: Environment) -> dict[str, int]:
    """Return the number of GPUs of each host, from Torque's lines "host-gpu0"."""
    path = environment.get("PBS_GPUFILE")
    if not path or not Path(path).is_file():
        return {}
    devices: dict[str, int] = {}
    for line in Path(path).read_text().split():
        name, gpu, _ = line.rpartition("-gpu")
        if gpu:
            devices[name] = devices.get(name, 0) + 1
    return devices


def _has_pals(environment: Environment) -> bool:
    if any(name.startswith(("PALS_", "CRAY_PALS")) for name in environment):
        return True
    folders = environment.get("PATH", "").split(os.pathsep)
    return any(os.access(Path(folder) / "palsrun", os.X_OK) for folder in folders if folder)
