"""Determine the socket of this process: its ranks read each other's memory faster within a
socket.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from .local_resources import unspanned
from .topology import whole

SOCKETS = "PACELINE_SOCKETS"  # hardware threads of sockets, with spaces between: "0-31 32-63"
NOWHERE = -1


def socket_of(
    cpus: Collection[int],
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> int:
    """A number for the socket that all of these hardware threads are on; NOWHERE where they are on
    several, or nobody knows.

    PACELINE_SOCKETS says which those of each are (or of each part of one, as its NUMA nodes), else
    sysfs does.

    Raises ValueError where PACELINE_SOCKETS is no such list.
    """
    if said := environment.get(SOCKETS):
        try:
            each = [set(unspanned(one)) for one in said.split()]
        except ValueError:
            hint = 'a list for each socket, as in "0-31 32-63"'
            raise ValueError(f"{SOCKETS}={said}: no hardware threads. HINT: {hint}") from None
        return next((at for at, one in enumerate(each) if cpus and set(cpus) <= one), NOWHERE)
    found = NOWHERE
    for cpu in cpus:
        package = whole(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
        if package is None or package < 0 or (found != NOWHERE and found != package):
            return NOWHERE  # of an unbound process after a few looks
        found = package
    return found
