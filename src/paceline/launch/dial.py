"""Connect an agent to its launcher, which may be busy with other visitors."""

import random
import time

from ..security.greeting import DROPPED
from .channel import Channel, visit

CONNECT_SECONDS = 5.0  # to each address of the launcher
PATIENCE_SECONDS = 30.0  # with a launcher that accepts the connection and drops it, or is silent
REFUSED_SECONDS = 1.0  # where nobody listens on any address
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


def dial(where: str, secret: str) -> Channel:
    """Connect to the launcher by one of its addresses, and try again where it drops us.

    Args:
        where: ``ADDRESS,PORT;ADDRESS,PORT``, as ``arrivals.AgentListener`` has it.
        secret: The job's.

    Raises:
        LauncherNotFoundError: Nobody listens there, or nobody who knows the secret.
    """
    begun, wait = time.monotonic(), FIRST_WAIT_SECONDS
    tried: dict[str, str] = {}
    dropped = False
    while True:
        silent = False
        for pair in where.split(";"):
            address, _, port = pair.rpartition(",")
            try:
                return visit(address, int(port), secret, CONNECT_SECONDS)
            except OSError as error:
                tried[address] = error.strerror or str(error)
                silent = silent or isinstance(error, TimeoutError)
                dropped = dropped or isinstance(error, DROPPED)
        patience = PATIENCE_SECONDS if dropped or silent else REFUSED_SECONDS
        # Not all agents that were dropped come back at the same time.
        pause = wait * random.uniform(0.5, 1.0)
        if time.monotonic() + pause - begun > patience:
            raise LauncherNotFoundError(tried, dropped)
        time.sleep(pause)
        wait = min(2 * wait, MAX_WAIT_SECONDS)
