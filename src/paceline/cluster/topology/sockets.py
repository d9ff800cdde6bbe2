"""Socket of this process. Ranks on one socket read each other's memory faster."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from .local_resources import parse_ranges
from .topology import read_sysfs_int

SOCKET_VARIABLE = (
    "PACELINE_SOCKETS"  # hardware threads of the sockets, separated by spaces: "0-31 32-63"
)
UNKNOWN_SOCKET = -1


def socket_of(
    cpus: Collection[int],
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> int:
    """Return the number of the socket that all of these hardware threads are on.

    NOWHERE if they are on several sockets, or if the socket is unknown. PACELINE_SOCKETS lists the
    hardware threads of each socket (or of each part of a socket, such as a NUMA node). Without it,
    the sockets are read from sysfs.

    Raises:
        ValueError: PACELINE_SOCKETS is not a list of hardware threads.
    """
    if said := environment.get(SOCKET_VARIABLE):
        try:
            each = [set(parse_ranges(one)) for one in said.split()]
        except ValueError:
            hint = 'give a list for each socket, as in "0-31 32-63"'
            raise ValueError(
                f"{SOCKET_VARIABLE}={said} is not a list of hardware threads. HINT: {hint}"
            ) from None
        return next(
            (at for at, one in enumerate(each) if cpus and set(cpus) <= one), UNKNOWN_SOCKET
        )
    found = UNKNOWN_SOCKET
    for cpu in cpus:
        package = read_sysfs_int(
            root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        )
        if package is None or package < 0 or (found != UNKNOWN_SOCKET and found != package):
            return UNKNOWN_SOCKET  # for an unbound process, this returns after reading a few files
        found = package
    return found
