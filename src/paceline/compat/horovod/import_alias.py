"""``import horovod`` and its submodules as other names of ``paceline.compat.horovod``.

The package in ``shim/`` calls ``replace_shim``. Its folder is on ``sys.path`` in ranks
(``cluster/horovod_import.py``), or in PYTHONPATH.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ...cluster.horovod_import import OURS, VARIABLE, find_installed
from ...cluster.rank_identity import rank_identity
from ...record.ring.launcher_messages import notify

OURS_PACKAGE = "paceline.compat.horovod"
OURS_DDL = "paceline.compat.ddl"
_WAYS_OUT = {
    "_keras": "import horovod.keras",
    "mxnet": "MXNet is no longer maintained; PyTorch scripts import horovod.torch",
    "spark": "start the script with paceline run, outside of Spark",
    "ray": "start the script with paceline run, outside of Ray",
    "runner": "start the script with paceline run or paceline horovodrun",
    "run": "start the script with paceline run or paceline horovodrun",
}


class _AliasLoader(importlib.abc.Loader):
    """Returns the module of ``paceline.compat.horovod`` itself, which is loaded once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # that of its own name, which the import has replaced


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``horovod.NAME`` in ``paceline.compat.horovod``, and nowhere else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "horovod" or not rest:
            return None
        first = rest.partition(".")[0]
        ours = f"{OURS_PACKAGE}.{rest}"
        if first not in _WAYS_OUT and importlib.util.find_spec(ours) is not None:
            return ModuleSpec(name, _AliasLoader(ours))
        way_out = _WAYS_OUT.get(
            first, "paceline run --horovod theirs uses Horovod, if it is installed"
        )
        raise ModuleNotFoundError(
            f"{name} does not exist in Paceline's implementation of Horovod, which is for PyTorch, "
            f"TensorFlow and Keras. HINT: {way_out}",
            name=name,
        )


def replace_shim(shim: str) -> None:
    """Replace the package of ``shim/`` with Horovod if that is installed, or with Paceline's.

    Args:
        shim: Name of the package, "horovod".
    """
    if os.environ.get(VARIABLE) != OURS and _load_installed(shim):
        return
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    sys.modules[shim] = importlib.import_module(OURS_PACKAGE)
    why = "" if os.environ.get(VARIABLE) == OURS else "Horovod is not installed; "
    announce(
        f"{why}import horovod uses Paceline's implementation, {OURS_PACKAGE} (see --horovod of "
        "paceline run)"
    )


def replace_ddl(shim: str) -> None:
    """Replace the package ``ddl`` of ``shim/`` with one that is installed or beside the script, or
    with Paceline's.
    """
    if _load_installed(shim):
        return
    sys.modules[shim] = importlib.import_module(OURS_DDL)
    announce(f"ddl is not installed; import ddl uses Paceline's implementation, {OURS_DDL}")


def _load_installed(name: str) -> bool:
    """Import an installed package in place of the shim; return whether there is one."""
    real = find_installed(sys.path, name)
    if real is None or real.loader is None:
        return False
    module = importlib.util.module_from_spec(real)
    sys.modules[name] = module
    real.loader.exec_module(module)
    return True


def announce(text: str) -> None:
    """Say once in a job which implementation an import has found."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    # A process of multiprocessing imports the script before it knows its parent.
    if again or any("multiprocessing" in word for word in sys.orig_argv):
        return
    try:
        rank = rank_identity(dict(os.environ)).rank
    except ValueError:  # hvd.init() reports it
        return
    if rank == 0:
        notify(f"paceline: {text}\n")
