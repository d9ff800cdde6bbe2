"""Read untrusted TOML files, and write TOML that ``tomllib`` reads back."""

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
        tree: dict[str, Any] = printable_tree(tomllib.loads(text))
        _check_integers(tree, path)
    except InvalidFileError:
        raise
    except RecursionError:
        raise InvalidFileError(path, "is not TOML: its tables are nested too deeply") from None
    except ValueError as error:  # tomllib.TOMLDecodeError, or a number of over 4,300 digits
        raise InvalidFileError(path, f"is not TOML: {error}") from None
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


# A minimal writer.

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
LINE = 140  # characters: enough for a figure; a longer table is written as a section


def dumps(tree: dict[str, Any]) -> str:
    """Return a tree of dicts, lists, strings, numbers and booleans as TOML.

    In each table plain values come first, then short tables as one line each, then long tables and
    lists of tables.
    """
    lines: list[str] = []
    _table(tree, "", lines)
    return "\n".join(lines).strip() + "\n"


def _table(tree: dict[str, Any], path: str, lines: list[str]) -> None:
    later = []
    for key, value in tree.items():
        line = None if _long(value) else f"{_key(key)} = {_value(value)}"
        if line is None or (isinstance(value, dict) and len(line) > LINE):
            later.append((f"{path}.{_key(key)}" if path else _key(key), value))
        else:
            lines.append(line)
    for name, value in later:
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            _table(value, name, lines)
            continue
        for entry in value:
            lines += ["", f"[[{name}]]"]
            _table(entry, name, lines)


def _long(value: Any) -> bool:
    """Whether a value does not fit on one line: a table of tables, or a list of tables."""
    if isinstance(value, dict):
        return any(isinstance(inner, dict | list) for inner in value.values())
    return isinstance(value, list) and any(isinstance(inner, dict) for inner in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))  # shortest text that is parsed to the same number
    if isinstance(value, list):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as TOML")


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return '"' + "".join(map(_character, text)) + '"'


def _character(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    return f"\\u{ord(character):04x}" if ord(character) < 32 or ord(character) == 127 else character
