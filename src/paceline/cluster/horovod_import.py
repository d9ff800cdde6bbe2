"""Which package ``import horovod`` finds in a rank: Horovod, or Paceline's implementation of it.

A folder with the packages ``horovod`` and ``ddl`` is added to ``sys.path``, from where processes
that the script starts with ``multiprocessing`` inherit it. Each package replaces itself with
``paceline.compat.horovod`` or ``paceline.compat.ddl``, or with the library of this name if that is
installed (``paceline/compat/horovod/import_alias.py``).
"""

import importlib.machinery
import os
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

from ..security.processes import is_open

VARIABLE = "PACELINE_HOROVOD"
AUTO = "auto"  # Paceline's, in scripts that use Horovod, if Horovod is not installed
OURS, THEIRS, OFF = "ours", "theirs", "off"
CHOICES = (OFF, OURS, THEIRS)
SHIM = Path(__file__).parents[1] / "compat" / "horovod" / "shim"


def check_choice(choice: str | None) -> str:
    """Return the value of --horovod. Raises ValueError for an unknown one."""
    if choice is not None and choice not in CHOICES:
        raise ValueError(
            f"--horovod must be {OFF}, {OURS} or {THEIRS}; this is {choice!r}. HINT: leave it out "
            "for the default"
        )
    return choice or AUTO


def find_installed(folders: list[str], package: str = "horovod") -> ModuleSpec | None:
    """Return where a package is installed in ``folders``; None if it is not.

    Paceline's own, folders without a module (``horovod/`` with scripts), and folders in which
    other users can add files do not count.
    """
    others = [folder for folder in folders if not _is_shim(folder) and not is_open(folder)]
    spec = importlib.machinery.PathFinder.find_spec(package, others)
    return spec if spec is not None and spec.origin is not None else None


def with_horovod(
    folders: list[str], used: bool, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return ``sys.path`` of a rank, with the folder of Paceline's package if it is wanted.

    Args:
        folders: ``sys.path`` without it.
        used: Whether the script uses Horovod.
        environment: Environment variables of the rank.
    """
    choice = environment.get(VARIABLE, AUTO)
    folders = [folder for folder in folders if not _is_shim(folder)]
    if choice == OURS:
        return [str(SHIM), *folders]
    if choice != AUTO or not used:
        return folders
    # before folders in which other users can add a package
    trusted = [folder for folder in folders if not is_open(folder)]
    others = [folder for folder in folders if is_open(folder)]
    return [*trusted, str(SHIM), *others]


def check_installed(choice: str, folders: list[str]) -> None:
    """Raise ValueError if --horovod theirs was given, and Horovod is not installed."""
    if choice == THEIRS and find_installed(folders) is None:
        raise ValueError(
            "--horovod theirs needs Horovod, which is not installed in this Python environment. "
            "HINT: --horovod ours runs the script with Paceline's implementation, or pip install "
            "horovod"
        )


def _is_shim(folder: str) -> bool:
    return Path(folder or os.curdir) == SHIM or os.path.realpath(folder) == os.path.realpath(SHIM)
