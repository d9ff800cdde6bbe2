"""Send Paceline's messages from a rank to the launcher, or to stderr without a launcher.

The launcher gives each rank a pipe (environment variable ``PACELINE_STATUS``, as pid:fd). It prints
the messages without a rank's tag, because they are about the job and not output of the rank.
"""

import json
import os
import sys
import threading
from typing import Any

from ...security.files import write_all
from ...security.text import for_terminal

_lock = threading.Lock()


def send_to_launcher(**message: Any) -> bool:
    """Send one message to the launcher as a JSON line; return whether there is a launcher."""
    pid, _, fd = os.environ.get("PACELINE_STATUS", "").partition(":")
    if pid != str(os.getpid()):
        return False
    data = (json.dumps(message) + "\n").encode()
    try:
        with _lock:
            write_all(int(fd), data)
    except OSError:  # the launcher has ended; stderr may still be read
        return False
    return True


def notify(text: str) -> None:
    """Print ``text`` for the user: whole lines, or a line that ends in a carriage return."""
    text = for_terminal(text)
    if not send_to_launcher(say=text):
        sys.stderr.write(text)
        sys.stderr.flush()
