"""Determine the rack of a host: hosts of one rack share a switch and its uplink."""

import os
from collections.abc import Mapping

from ..schedulers.hostlist import expand

RACKS = "PACELINE_RACKS"  # host lists of racks, with spaces between: "n[1-16] n[17-32]"


def rack_of(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """A name for it, the same for all its hosts; "" where none is known.

    PACELINE_RACKS has hosts by their names, else Slurm says which switches lead to this host
    (SLURM_TOPOLOGY_ADDR, of topology/tree and topology/block), and the lowest is taken.

    Raises ValueError where PACELINE_RACKS does not have the host, or is no list.
    """
    if said := environment.get(RACKS):
        short = host.partition(".")[0]
        for one in said.split():
            if {host, short} & set(expand(one)):
                return one
        raise ValueError(f"{RACKS}={said} does not have {host}. HINT: every host in one rack")
    *switches, node = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    # A variable that has come from another host says nothing of this one.
    return ".".join(switches) if node == host.partition(".")[0] else ""
