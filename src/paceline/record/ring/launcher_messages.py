"""Paceline's own words from inside a rank: to the launcher where there is one, else to stderr.

The launcher hands each rank a pipe (``PACELINE_STATUS``, as pid:fd) and prints what comes
through it without a rank's tag, because it is the job that speaks and not the rank.
"""

import json
import os
import sys
import threading
from typing import Any

from ...security.terminal import for_terminal

_lock = threading.Lock()


def send_to_launcher(**message: Any) -> bool:
    """Send one message, a JSON line, to the launcher; whether there was one to take it."""
    pid, _, fd = os.environ.get("PACELINE_STATUS", "").partition(":")
    if pid != str(os.getpid()):
        return False
    data = (json.dumps(message) + "\n").encode()
    try:
        with _lock:
            while data:
                data = data[os.write(int(fd), data) :]
    except OSError:  # it has gone; whoever reads stderr may still be there
        return False
    return True


def notify(text: str) -> None:
    """Show ``text`` (whole lines, or a line that ends in a carriage return) to the user."""
    text = for_terminal(text)
    if not send_to_launcher(say=text):
        sys.stderr.write(text)
        sys.stderr.flush()
