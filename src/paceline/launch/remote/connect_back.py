"""Connect an agent to its launcher, which may be busy with other visitors."""

import random
import time

from ...security.greeting import DROPPED
from ..channel import Channel, connect_channel

CONNECT_SECONDS = 5.0  # to each address of the launcher
PATIENCE_SECONDS = (
    25.0  # with a launcher that drops connections or is silent, before a last attempt
)
REFUSED_SECONDS = 1.0  # since some address did more than refuse the connection
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 2.0  # between two attempts; each waits twice as long


class LauncherNotFoundError(Exception):
    """No address of the launcher has led to it.

    Attributes:
        tried: What happened, by address.
        dropped: Whether a connection was made and dropped during the greeting.
    """

    def __init__(self, tried: dict[str, str], dropped: bool) -> None:
        super().__init__("; ".join(f"{address}: {why}" for address, why in tried.items()))
        self.tried, self.dropped = tried, dropped


def connect_to_launcher(where: str, secret: str) -> Channel:
    """Connect to the launcher by one of its addresses, and try again where it drops us.

    Args:
        where: ``ADDRESS,PORT;ADDRESS,PORT``, as ``arrivals.AgentListener`` has it.
        secret: The job's.

    Raises:
        LauncherNotFoundError: Nobody listens there, or nobody who knows the secret.
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
                dropped = dropped or isinstance(error, DROPPED)
                if isinstance(error, (*DROPPED, TimeoutError)):
                    answered = time.monotonic()
        now = time.monotonic()
        if now - begun > PATIENCE_SECONDS or now - answered > REFUSED_SECONDS:
            raise LauncherNotFoundError(tried, dropped)
        # Not all agents that were dropped come back at the same time.
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, MAX_WAIT_SECONDS)
