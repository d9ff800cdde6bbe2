"""Connection from an agent to its launcher, which may be busy with other connections."""

import random
import time

from ...security.handshake import DROPPED_CONNECTION_ERRORS
from ..channel import Channel, connect_channel

CONNECT_SECONDS = 5.0  # timeout for each address of the launcher
PATIENCE_SECONDS = 25.0  # until the last attempt, if the launcher drops connections or is silent
REFUSED_SECONDS = 1.0  # until the last attempt, if all addresses refuse the connection
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 2.0  # between attempts; doubled each time


class LauncherNotFoundError(Exception):
    """The agent could not connect to any address of the launcher.

    Attributes:
        tried: Error message, by address.
        dropped: Whether a connection was made and dropped during the handshake.
    """

    def __init__(self, tried: dict[str, str], dropped: bool) -> None:
        super().__init__("; ".join(f"{address}: {why}" for address, why in tried.items()))
        self.tried, self.dropped = tried, dropped


def connect_to_launcher(where: str, secret: str) -> Channel:
    """Connect to the launcher by one of its addresses, and retry if it drops the connection.

    Args:
        where: The addresses in the form ``ADDRESS,PORT;ADDRESS,PORT`` (``AgentListener.where``).
        secret: The job's secret.

    Raises:
        LauncherNotFoundError: No process listens on the addresses, or none that knows the secret.
    """
    begun = answered = time.monotonic()
    wait, dropped = FIRST_WAIT_SECONDS, False
    tried: dict[str, str] = {}
    while True:
        for pair in where.split(";"):
            address, _, port = pair.rpartition(",")
            try:
                return connect_channel(address, int(port), secret, CONNECT_SECONDS)
            except OSError as error:
                tried[address] = error.strerror or str(error)
                dropped = dropped or isinstance(error, DROPPED_CONNECTION_ERRORS)
                if isinstance(error, (*DROPPED_CONNECTION_ERRORS, TimeoutError)):
                    answered = time.monotonic()
        now = time.monotonic()
        if now - begun > PATIENCE_SECONDS or now - answered > REFUSED_SECONDS:
            raise LauncherNotFoundError(tried, dropped)
        # Random, so that not all dropped agents reconnect at the same time.
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, MAX_WAIT_SECONDS)
