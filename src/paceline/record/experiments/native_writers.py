"""Functions of libraries that open a path natively, where Python's functions do not see it.

Each is replaced by one that passes on the path that ``redirect`` returns.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

Redirect = Callable[..., Any]  # (path, writes, keeps) -> path

# By module: function, position and name of the path, whether it writes, whether the file's content
# is needed then.
FUNCTIONS: dict[str, tuple[tuple[str, int, str, bool, bool], ...]] = {
    "torch.serialization": (("save", 1, "f", True, False), ("load", 0, "f", False, True)),
    "safetensors.torch": (
        ("save_file", 1, "filename", True, False),
        ("load_file", 0, "filename", False, True),
        ("safe_open", 0, "filename", False, True),
    ),
    "safetensors.numpy": (
        ("save_file", 1, "filename", True, False),
        ("load_file", 0, "filename", False, True),
    ),
    "safetensors": (("safe_open", 0, "filename", False, True),),
    "cv2": (("imwrite", 0, "filename", True, False), ("imread", 0, "filename", False, True)),
    "pyarrow.parquet": (
        ("write_table", 1, "where", True, False),
        ("read_table", 0, "source", False, True),
    ),
}
SAME = {"torch.serialization": "torch"}  # where the functions are also found


def hooks(redirect: Redirect) -> dict[str, Callable[[Any], None]]:
    """Return a function for each module, to be called with it after its import."""
    found: dict[str, Callable[[Any], None]] = {
        name: functools.partial(_replace_functions, redirect, name) for name in FUNCTIONS
    }
    return found | {
        "h5py._hl.files": functools.partial(_replace_h5py, redirect),
        "sqlite3.dbapi2": functools.partial(_replace_sqlite, redirect),
    }


def _replace_functions(redirect: Redirect, name: str, module: Any) -> None:
    for function, position, keyword, writes, keeps in FUNCTIONS[name]:
        original = getattr(module, function, None)
        if original is None or isinstance(original, type):
            continue
        replaced = _replaced(redirect, original, position, keyword, writes, keeps)
        setattr(module, function, replaced)
        if name in SAME:
            setattr(importlib.import_module(SAME[name]), function, replaced)


def _replaced(
    redirect: Redirect,
    function: Callable[..., Any],
    position: int,
    keyword: str,
    writes: bool,
    keeps: bool,
) -> Callable[..., Any]:
    @functools.wraps(function)
    def replaced(*args: Any, **options: Any) -> Any:
        if keyword in options:
            options[keyword] = redirect(options[keyword], writes, keeps)
        elif len(args) > position:
            path = redirect(args[position], writes, keeps)
            args = (*args[:position], path, *args[position + 1 :])
        return function(*args, **options)

    return replaced


def _replace_h5py(redirect: Redirect, module: Any) -> None:
    make = module.File.__init__

    @functools.wraps(make)
    def init(file: Any, name: Any, mode: str = "r", *args: Any, **options: Any) -> None:
        make(file, redirect(name, mode != "r", mode in ("a", "r+")), mode, *args, **options)

    module.File.__init__ = init


def _replace_sqlite(redirect: Redirect, module: Any) -> None:
    connect = module.connect

    @functools.wraps(connect)
    def connect_to_copy(database: Any, *args: Any, **options: Any) -> Any:
        if options.get("uri") or database in (":memory:", ""):
            return connect(database, *args, **options)
        return connect(redirect(database, True, True), *args, **options)

    module.connect = connect_to_copy
    if hasattr(sys.modules.get("sqlite3"), "connect"):  # else it takes it from this module
        sys.modules["sqlite3"].connect = connect_to_copy  # type: ignore[attr-defined]
