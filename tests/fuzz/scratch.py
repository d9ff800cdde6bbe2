"""A folder for the files that a target feeds to Paceline."""

import atexit
import shutil
import tempfile
from pathlib import Path


def new_folder() -> Path:
    """Make a temporary folder, which is removed when the process ends. (A fuzzing process is ended
    without that: there the folder lies in one that its starter removes.)"""
    folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
