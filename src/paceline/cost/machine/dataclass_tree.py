"""Convert frozen dataclasses to trees of plain values and back, with checks by field.

The type of a field defines its content. Its metadata may contain: ``unit``, the unit of a Figure;
``signed``, if a number may be negative; ``least``, the minimum of a number; ``unlimited``, if the
word "unlimited" stands for ``UNLIMITED``.
"""

import math
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

from ...security.text import printable

LEAST, MOST = 1e-30, 1e30  # range of a figure other than 0: quotients of two do not overflow
UNLIMITED = (1 << 63) - 1  # value of a limit; "unlimited" in files


def to_tree(value: Any, complete: bool = False) -> Any:
    """Return a value as dicts and lists; fields with default values only if ``complete``."""
    if is_dataclass(value):
        result = {}
        for field in fields(value):
            inner = getattr(value, field.name)
            if not complete and field.default != inner != _fresh(field):
                result[field.name] = to_tree(inner)
            elif complete or field.name == "version":
                result[field.name] = to_tree(inner, complete)
            if field.metadata.get("unlimited") and inner == UNLIMITED:
                result[field.name] = "unlimited"
        return result
    if isinstance(value, tuple | list):
        return [to_tree(inner, complete) for inner in value]
    if isinstance(value, dict):
        return {key: to_tree(inner, complete) for key, inner in value.items()}
    return value


def from_tree(kind: Any, data: Any, where: str, unknown: list[str]) -> Any:
    """Return the dataclass ``kind`` built from its tree.

    Names of keys without a field are added to ``unknown``. Raises ValueError that names the key and
    its value.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the file'} = {shorten(data)} is not a table")
    hints, given = _hints(kind), {}
    for field in fields(kind):
        name = f"{where}.{field.name}" if where else field.name
        if field.name in data:
            given[field.name] = _read(hints[field.name], data[field.name], name, field, unknown)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    names = {field.name for field in fields(kind)}
    unknown += [f"{where}.{key}" if where else key for key in data if key not in names]
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def _read(kind: Any, value: Any, where: str, field: Field[Any], unknown: list[str]) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(part for part in kind.__args__ if part is not type(None))
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} = {shorten(value)} is not a list")
        one = typing.get_args(kind)[0]
        return tuple(
            _read(one, inner, f"{where}[{i}]", field, unknown) for i, inner in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} = {shorten(value)} is not a table")
        return {key: _read(str, inner, f"{where}.{key}", field, unknown)
                for key, inner in value.items()}  # fmt: skip
    if is_dataclass(kind):
        built = from_tree(kind, value, where, unknown)
        unit = field.metadata.get("unit")
        if unit is not None and built.unit != unit:
            raise ValueError(f"{where}.unit = {shorten(built.unit)}, and must be {unit!r}")
        return built
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{where} = {shorten(value)} is not a text in quotes")
        return value
    return _number(kind, value, where, field)


def _number(kind: Any, value: Any, where: str, field: Field[Any]) -> float:
    if field.metadata.get("unlimited") and value == "unlimited":
        return UNLIMITED
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{where} = {shorten(value)} is not a {'whole ' * (kind is int)}number")
    if isinstance(value, int) and abs(value) > UNLIMITED:
        raise ValueError(f"{where} = {shorten(value)} does not fit 64 bits")
    if not math.isfinite(value):
        raise ValueError(f"{where} = {value} is not a finite number")
    if isinstance(value, float) and value and not LEAST <= abs(value) <= MOST:
        raise ValueError(f"{where} = {value} is not from {LEAST:g} to {MOST:g}")
    if value < field.metadata.get("least", 0) and value >= 0:
        raise ValueError(f"{where} = {value} is less than {field.metadata['least']}")
    if value < 0 and not field.metadata.get("signed"):
        raise ValueError(f"{where} = {value} is negative")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fresh(field: Field[Any]) -> Any:
    return MISSING if field.default_factory is MISSING else field.default_factory()


def shorten(value: Any) -> str:
    """Return a value as an error message quotes it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of over 4,300 digits; a recursive list
        return f"a {type(value).__name__}"
    return printable(text if len(text) <= 60 else f"{text[:57]}...")
