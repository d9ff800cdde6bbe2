"""The folder of a run of ``paceline verify``: all nodes have to share it."""

import os
import socket
from pathlib import Path

from ...security.shared_folder import sees_token
from .settings import VerifySettings

NOT_SHARED = "paceline: verify: this node does not share the folder"  # begins the error


def check_folder(settings: VerifySettings) -> None:
    """Check, before the script runs, that this node sees and can write the folder of the run.

    Raises:
        SystemExit: It does not. The message is printed.
    """
    if settings.token is None:
        return
    folder = Path(settings.folder)
    if sees_token(folder, settings.token) and os.access(folder, os.W_OK):
        return
    raise SystemExit(
        f"{NOT_SHARED} {folder.parent} ({socket.gethostname()}). HINT: let TMPDIR be a folder that "
        "all nodes share: TMPDIR=$HOME paceline verify ..."
    )
