"""Allocation of a Flux instance.

Flux's environment variables name no hosts; `flux getattr hostlist` does. Callers that may start
processes run it and pass its output.
"""

from .allocation import Allocation
from .env_numbers import Environment
from .hostfile import Host
from .hostlist import expand_hostlist


def allocation(environment: Environment, hostlist: str | None = None) -> Allocation | None:
    """Return the allocation of the Flux instance, or None outside of Flux.

    ``hosts`` of the result is empty without ``hostlist``. A batch script has FLUX_URI and, inside
    another Flux job, FLUX_ENCLOSING_ID. The tasks of `flux run` have FLUX_JOB_ID.
    """
    if not environment.get("FLUX_JOB_ID") and not environment.get("FLUX_URI"):
        return None
    job = environment.get("FLUX_ENCLOSING_ID") or environment.get("FLUX_JOB_ID") or ""
    names = (
        dict.fromkeys(expand_hostlist(hostlist)) if hostlist else {}
    )  # several brokers may run on a host
    return Allocation("Flux", job, tuple(Host(name) for name in names), "flux")
