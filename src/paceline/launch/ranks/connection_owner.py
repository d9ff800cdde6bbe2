"""Find the user whose process holds the other end of a TCP connection within this node.

A TCP connection carries no credentials, but the kernel knows the owner of each socket of this node
and network namespace. It answers for one connection over netlink (``NETLINK_SOCK_DIAG``), and lists
all connections in ``/proc/net/tcp``, where netlink is not available.
"""

import ipaddress
import socket
import struct
from pathlib import Path

Endpoint = tuple[str, int]  # address and port

_SOCK_DIAG_BY_FAMILY, _NETLINK_SOCK_DIAG, _NLM_F_REQUEST, _NLMSG_ERROR = 20, 4, 1, 2
_ENOENT = 2
_ESTABLISHED = 1
_MESSAGE_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_PORTS = struct.Struct(">HH16s16s")  # inet_diag_sockid: ports, addresses
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
# inet_diag_msg: family, state, timer, retransmissions, sockid, expires, queues, user, inode
_ANSWER = struct.Struct("=BBBB48sIIIII")


def connection_owner(peer: Endpoint, own: Endpoint) -> int | None:
    """Return the user ID of the process at ``peer``, the other end of an accepted connection.

    Args:
        peer: Address of the other end (``getpeername``).
        own: Address of this end (``getsockname``).

    Returns:
        None if no established connection of this network namespace has these ends: the other end
        is on another node, or its process has closed it.
    """
    try:
        return _ask_netlink(peer, own)
    except OSError:
        return _search_tables(peer, own)


def _ask_netlink(peer: Endpoint, own: Endpoint) -> int | None:
    """Ask for the socket that is bound to ``peer`` and connected to ``own``.

    Raises OSError if the kernel does not answer such questions.
    """
    address, own_address = _plain(peer[0]), _plain(own[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    ends = _PORTS.pack(peer[1], own[1], address.packed, own_address.packed)
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends
    request += _ANY_INTERFACE_AND_COOKIE
    header = _MESSAGE_HEADER.pack(
        _MESSAGE_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.sendto(header + request, (0, 0))
        answer = netlink.recv(4096)
    _, kind, _, _, _ = _MESSAGE_HEADER.unpack_from(answer)
    if kind == _NLMSG_ERROR:
        (error,) = struct.unpack_from("=i", answer, _MESSAGE_HEADER.size)
        if error == -_ENOENT:
            return None
        raise OSError(-error, "the kernel does not answer questions about sockets")
    _, state, _, _, found, _, _, _, user, _ = _ANSWER.unpack_from(answer, _MESSAGE_HEADER.size)
    # A listening socket at ``peer`` matches as well; a closed one has lost its user.
    if state != _ESTABLISHED or found[:4] != ends[:4]:
        return None
    return int(user)


def _search_tables(peer: Endpoint, own: Endpoint) -> int | None:
    address, own_address = _plain(peer[0]), _plain(own[0])
    for name in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, remote, state, _, _, _, user, *_ = row.split()
            if (
                int(state, 16) == _ESTABLISHED
                and _endpoint(local) == (address, peer[1])
                and _endpoint(remote) == (own_address, own[1])
            ):
                return int(user)
    return None


def _endpoint(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Return the address and port of ``0100007F:1F90``: words of the address in native order."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(str(ipaddress.ip_address(packed))), int(port, 16)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address, without the scope, of IPv4 also where IPv6 wraps it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found
