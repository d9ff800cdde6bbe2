"""Allocation of a Cobalt job: from a node file, or from node numbers ("3-5,8") as on Theta."""

from .allocation import Allocation
from .env_numbers import Environment, number
from .hostfile import Host
from .hostlist import expand_numbers
from .nodefile import read_nodefile


def allocation(environment: Environment) -> Allocation | None:
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
