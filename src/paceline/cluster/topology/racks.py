"""Rack of a host. Hosts of one rack share a switch and its uplink."""

import os
from collections.abc import Mapping

from ..schedulers.hostlist import expand_hostlist

RACKS_VARIABLE = (
    "PACELINE_RACKS"  # host lists of the racks, separated by spaces: "n[1-16] n[17-32]"
)


def rack_of(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name for the host's rack, the same for all its hosts; empty if unknown.

    PACELINE_RACKS lists the hosts of each rack. Without it, the rack is the lowest switch
    above this host in Slurm's SLURM_TOPOLOGY_ADDR (topology/tree and topology/block), and its name
    is the path of switches down to it.

    Raises:
        ValueError: PACELINE_RACKS does not contain the host, or is not a list of host lists.
    """
    if said := environment.get(RACKS_VARIABLE):
        short = host.partition(".")[0]
        for one in said.split():
            if {host, short} & set(expand_hostlist(one)):
                return one
        raise ValueError(
            f"{RACKS_VARIABLE}={said} does not have {host}. HINT: every host in one rack"
        )
    *switches, node = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    # An environment variable that was inherited from another host does not describe this one.
    return ".".join(switches) if node == host.partition(".")[0] else ""
