"""Read untrusted TOML files."""

import re
import tomllib
from typing import Any

from ...security.files import InvalidFileError, Name, read_regular
from ...security.schema import check_parsed_size
from ...security.text import printable_tree

MAX_PARSED_BYTES = 1 << 30
# tomllib's memory while it parses: sets and dicts for each table, array and part of a dotted key.
# Measured, and rounded up. A machine file takes 27 times its size by this estimate.
TOML_COSTS = {b"[": 900, b"{": 900, b".": 1100, b"=": 100, b",": 40}
_FLOAT = re.compile(rb"[=,]\s*[-+]?\d+\.\d")  # its point is no part of a key
MAX_INTEGER = (1 << 63) - 1  # TOML integers have 64 bits
MAX_KEY_PARTS = 32  # parts of a key a.b.c: tomllib's run time is quadratic in their number
_LONG_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++\s*+\.\s*+)" + f"{{{MAX_KEY_PARTS}}}")


def read_toml(path: Name, max_bytes: int) -> dict[str, Any]:
    """Return the tree of a TOML file, with all strings printable.

    Raises:
        InvalidFileError: The file is larger than ``max_bytes``, would take too much memory, or is
            not UTF-8 or not TOML.
        OSError: The file can't be opened, or is not a regular file.
    """
    data = read_regular(path, max_bytes)
    check_size(data, path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidFileError(path, "is not TOML: it is not UTF-8 text") from None
    if _LONG_KEY.search(text):
        raise InvalidFileError(path, f"has a key of over {MAX_KEY_PARTS} parts")
    try:
        tree = printable_tree(tomllib.loads(text))
        _check_integers(tree, path)
    except InvalidFileError:
        raise
    except RecursionError:
        raise InvalidFileError(path, "is not TOML: its tables are nested too deeply") from None
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number of over 4,300 digits
        raise InvalidFileError(path, f"is not TOML: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidFileError(path, "is not TOML")
    return tree


def check_size(data: bytes, path: Name) -> None:
    """Raise InvalidFileError if TOML may take more than MAX_PARSED_BYTES of memory."""
    floats = sum(1 for _ in _FLOAT.finditer(data))
    check_parsed_size(data, TOML_COSTS, MAX_PARSED_BYTES + floats * TOML_COSTS[b"."], path)


def _check_integers(tree: Any, path: Name) -> None:
    """Raise InvalidFileError for an integer that does not fit 64 bits."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            _check_integers(value, path)
    elif isinstance(tree, int) and not -MAX_INTEGER <= tree <= MAX_INTEGER:
        raise InvalidFileError(path, "has an integer that does not fit 64 bits")
