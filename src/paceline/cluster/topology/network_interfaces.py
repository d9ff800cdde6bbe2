"""The network interfaces of this host and the addresses at which other hosts may reach it."""

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR, SIOCGIFFLAGS = 0x8915, 0x8913
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
# Bridges between the containers and virtual machines of one host. They have the same address on
# every host.
INTERNAL_PREFIXES = (
    *("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxc", "tun", "tap"),
)


@dataclass(frozen=True)
class Link:
    """One network interface with one address.

    Attributes:
        interface: Name of the interface.
        address: IPv4 or IPv6 address.
        speed: Speed in Mbit/s; 0 if the kernel does not know it.
    """

    interface: str
    address: str
    speed: int = 0


def network_links() -> list[Link]:
    """Return the interfaces that are up, except loopback.

    The fastest come first, those that only reach containers last. The address is the interface's
    IPv4 address if it has one, else its global IPv6 address.
    """
    found = []
    for _, name in socket.if_nameindex():
        if not _is_up(name):
            continue
        address = _ipv4(name) or _ipv6(name)
        if address is not None:
            found.append(Link(name, address, _speed(name)))
    return sorted(
        found, key=lambda link: (link.interface.startswith(INTERNAL_PREFIXES), -link.speed)
    )


def is_local_host(name: str) -> bool:
    """Return whether a host name or address refers to this host."""
    name = name.rpartition("@")[2]
    hostname = socket.gethostname()
    if name in ("localhost", hostname, hostname.partition(".")[0]):
        return True
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {link.address for link in network_links()}
    return any(
        address in addresses or ipaddress.ip_address(address).is_loopback
        for address in (str(entry[4][0]) for entry in entries)
    )


def _is_up(name: str) -> bool:
    (flags,) = struct.unpack_from("H", _ioctl(name, SIOCGIFFLAGS) or bytes(32), 16)
    return bool(flags & IFF_UP and flags & IFF_RUNNING and not flags & IFF_LOOPBACK)


def _ipv4(name: str) -> str | None:
    answer = _ioctl(name, SIOCGIFADDR)
    return socket.inet_ntoa(answer[20:24]) if answer else None


def _ioctl(name: str, question: int) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            return fcntl.ioctl(handle, question, struct.pack("256s", os.fsencode(name)[:15]))
        except OSError:
            return None


def _ipv6(name: str) -> str | None:
    try:
        table = Path("/proc/net/if_inet6").read_text()
    except OSError:
        return None
    for line in table.splitlines():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope == "00":
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def _speed(name: str) -> int:
    try:
        return max(0, int(Path(f"/sys/class/net/{name}/speed").read_text()))
    except (OSError, ValueError):
        return 0
