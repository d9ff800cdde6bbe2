"""Minimal TOML writer: ``tomllib`` reads back what was written."""

import re
from typing import Any

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
