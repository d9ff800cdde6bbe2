"""A Flux instance. Its variables name no host: `flux getattr hostlist` does, and whoever may
start processes passes on what it said."""

from .allocation import Allocation
from .env_numbers import Environment
from .hostfile import Host
from .hostlist import expand


def allocation(environment: Environment, hostlist: str | None = None) -> Allocation | None:
    """``hosts`` is empty without ``hostlist``. A batch script has FLUX_URI and, where a Flux job
    encloses it, FLUX_ENCLOSING_ID; the tasks of `flux run` have FLUX_JOB_ID."""
    if not environment.get("FLUX_JOB_ID") and not environment.get("FLUX_URI"):
        return None
    job = environment.get("FLUX_ENCLOSING_ID") or environment.get("FLUX_JOB_ID") or ""
    names = dict.fromkeys(expand(hostlist)) if hostlist else {}  # brokers may share a host
    return Allocation("Flux", job, tuple(Host(name) for name in names), "flux")
