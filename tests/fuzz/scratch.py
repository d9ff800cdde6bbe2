"""A folder for the files that a target passes to Paceline."""

import atexit
import shutil
import tempfile
from pathlib import Path


def new_folder() -> Path:
    """Create a temporary folder that is removed when the process exits.

    A fuzzing process ends without exit handlers. Its folder lies in one that the starter removes.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
