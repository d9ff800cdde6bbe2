"""Rack of a host. Hosts of one rack share a switch and its uplink."""

import os
from collections.abc import Mapping

from ..schedulers.hostlist import expand_hostlist

MAX_LISTED = 8  # hosts of a switch, and switches, in a message
RACKS_VARIABLE = (
    "PACELINE_RACKS"  # host lists of the racks, separated by spaces: "n[1-16] n[17-32]"
)


def rack_or_unknown(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the host's rack as ``rack_of`` does; empty if PACELINE_RACKS is not valid for it."""
    try:
        return rack_of(host, environment)
    except ValueError:
        return ""


def spread_over_switches(racks: Mapping[str, str]) -> str:
    """Return which hosts are at which leaf switch; empty if at one, or if a host's is unknown.

    racks: Result of ``rack_of`` by host.
    """
    hosts_by_rack: dict[str, list[str]] = {}
    for host, rack in racks.items():
        hosts_by_rack.setdefault(rack, []).append(host)
    if len(hosts_by_rack) < 2 or "" in hosts_by_rack:
        return ""
    parts = [
        f"{rack if '[' in rack or ',' in rack else rack.rpartition('.')[2]}: {_shortened(hosts)}"
        for rack, hosts in hosts_by_rack.items()
    ]
    more = f"; {len(parts) - MAX_LISTED} more" if len(parts) > MAX_LISTED else ""
    return (
        f"the nodes are at {len(parts)} leaf switches ({'; '.join(parts[:MAX_LISTED])}{more}). "
        "HINT: paceline submit --switches 1 (sbatch --switches=1) requests nodes at one leaf switch"
    )


def rack_of(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name for the host's rack, the same for all its hosts; empty if unknown.

    PACELINE_RACKS lists the hosts of each rack. Without it, the rack is the lowest switch
    above this host in Slurm's SLURM_TOPOLOGY_ADDR (topology/tree and topology/block), and its name
    is the path of switches down to it.

    Raises:
        ValueError: PACELINE_RACKS does not contain the host, or is not a list of host lists.
    """
    if racks := environment.get(RACKS_VARIABLE):
        short = host.partition(".")[0]
        for rack in racks.split():
            if {host, short} & set(expand_hostlist(rack)):
                return rack
        raise ValueError(
            f"{RACKS_VARIABLE}={racks} does not contain {host}. HINT: list every node in one rack"
        )
    *switches, node = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    # An environment variable that was inherited from another host does not describe this one.
    return ".".join(switches) if node == host.partition(".")[0] else ""


def _shortened(hosts: list[str]) -> str:
    more = f" and {len(hosts) - MAX_LISTED} more" if len(hosts) > MAX_LISTED else ""
    return " ".join(hosts[:MAX_LISTED]) + more
