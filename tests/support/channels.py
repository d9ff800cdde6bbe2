"""The listening side of a channel, for one visitor."""

import socket

from paceline.launch import channel
from paceline.security.handshake import run_handshake


def accept_channel(visitor: socket.socket, secret: str) -> channel.Channel | None:
    """Greet one visitor. Return a channel if it knows the secret, else close it and return None."""
    try:
        handshake = channel.host_handshake(secret)
        nonces = run_handshake(visitor, handshake, channel.HANDSHAKE_TIMEOUT_S)
        return channel.channel_of_visitor(visitor, secret, nonces)
    except OSError:
        visitor.close()
        return None
