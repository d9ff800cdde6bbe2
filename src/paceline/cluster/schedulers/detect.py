"""Detection of the scheduler and the allocation that this process runs in."""

import os
from pathlib import Path

from . import lsf, slurm
from .allocation import Allocation, count_hosts, read_nodefile
from .env_numbers import Environment, number
from .hostfile import Host
from .hostlist import expand_hostlist, expand_numbers


def find_allocation(environment: Environment) -> Allocation | None:
    """Return the allocation that this process runs in, or None.

    Raises:
        ValueError: Environment variables of a scheduler contradict each other.
    """
    return (
        slurm.allocation(environment)
        or lsf.allocation(environment)
        or _pbs_allocation(environment)
        or flux_allocation(environment)
        or _cobalt_allocation(environment)
    )


def _pbs_allocation(environment: Environment) -> Allocation | None:
    """Return the allocation of PBS Pro, OpenPBS or Torque, from its node file."""
    job = environment.get("PBS_JOBID")
    if not job or not environment.get("PBS_NODEFILE"):
        return None
    slots = read_nodefile(environment, "PBS_NODEFILE")
    # PBS Pro writes one line per host if the job did not request processes (mpiprocs).
    has_processes = "PBS_NP" in environment or environment.get("NCPUS") == "1"
    has_slots = has_processes or max(slots.values()) > 1
    cpus = number(environment, "NCPUS") or number(environment, "PBS_NUM_PPN")
    devices = _torque_devices(environment)
    hosts = [
        Host(name, count if has_slots else None, devices.get(name, 0) if devices else None, cpus)
        for name, count in slots.items()
    ]
    return Allocation("PBS", job, tuple(hosts), "palsrun" if _has_pals(environment) else "ssh")


def _torque_devices(environment: Environment) -> dict[str, int]:
    """Return the number of GPUs of each host, from Torque's lines "host-gpu0"."""
    path = environment.get("PBS_GPUFILE")
    if not path or not Path(path).is_file():
        return {}
    lines = Path(path).read_text().split()
    return count_hosts([line.rpartition("-gpu")[0] for line in lines if "-gpu" in line])


def _has_pals(environment: Environment) -> bool:
    if any(name.startswith(("PALS_", "CRAY_PALS")) for name in environment):
        return True
    folders = environment.get("PATH", "").split(os.pathsep)
    return any(os.access(Path(folder) / "palsrun", os.X_OK) for folder in folders if folder)


def flux_allocation(environment: Environment, hostlist: str | None = None) -> Allocation | None:
    """Return the allocation of the Flux instance, or None outside of Flux.

    Flux's environment variables name no hosts; `flux getattr hostlist` does. Callers that may start
    processes run it and pass its output; without it, ``hosts`` of the result is empty. A batch
    script has FLUX_URI and, inside another Flux job, FLUX_ENCLOSING_ID. The tasks of `flux run`
    have FLUX_JOB_ID.
    """
    if not environment.get("FLUX_JOB_ID") and not environment.get("FLUX_URI"):
        return None
    job = environment.get("FLUX_ENCLOSING_ID") or environment.get("FLUX_JOB_ID") or ""
    # several brokers may run on a host
    names = dict.fromkeys(expand_hostlist(hostlist)) if hostlist else {}
    return Allocation("Flux", job, tuple(Host(name) for name in names), "flux")


def _cobalt_allocation(environment: Environment) -> Allocation | None:
    """Return a Cobalt job's nodes, from a node file, or from numbers ("3-5,8") as on Theta."""
    job = environment.get("COBALT_JOBID")
    if not job:
        return None
    if environment.get("COBALT_NODEFILE"):
        source, names = "COBALT_NODEFILE", list(read_nodefile(environment, "COBALT_NODEFILE"))
    elif environment.get("COBALT_PARTNAME"):
        source = "COBALT_PARTNAME"
        try:
            names = [f"nid{int(n):05d}" for n in expand_numbers(environment[source])]
        except ValueError as mistake:
            raise ValueError(
                f"{source}={environment[source]}: {mistake}. HINT: write it as in 3-5,8"
            ) from None
    else:
        return None
    size = number(environment, "COBALT_JOBSIZE")
    if size is not None and size != len(names):
        raise ValueError(
            f"the environment has COBALT_JOBSIZE={size} beside {source}={environment[source]}, "
            f"which are {len(names)} hosts. HINT: unset the one that was set by hand"
        )
    return Allocation("Cobalt", job, tuple(Host(name) for name in names), "ssh")
