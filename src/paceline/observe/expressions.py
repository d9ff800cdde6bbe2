"""Values of simple expressions in the source of a script, without running its code."""

import ast
import inspect
import linecache
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: a / b,
    ast.Mod: lambda a, b: a % b,
}
# Functions without effects.
_PURE: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "len": len,
    "max": max,
    "min": min,
    "round": round,
}


class Variables(Protocol):
    """Local and global variables: a frame, or ``Scope``."""

    @property
    def f_locals(self) -> Mapping[str, Any]: ...

    @property
    def f_globals(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Scope:
    """Local and global variables."""

    f_locals: Mapping[str, Any]
    f_globals: Mapping[str, Any]


class UnknownValueError(ValueError):
    """An expression whose value is not known without running code of the script."""


@lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module | None:
    """Return the syntax tree of a file; None if it has no Python source."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def value_of(node: ast.expr, frame: Variables) -> Any:
    """Return the value of an expression of names, attributes, keys, numbers and arithmetic.

    Args:
        node: The expression.
        frame: Has its variables.

    Raises:
        UnknownValueError: The expression contains something else.
    """
    try:
        return _value(node, frame)
    except UnknownValueError:
        raise
    except Exception as error:  # of the values' own types
        raise UnknownValueError(f"{error}") from None


def _value(node: ast.expr, frame: Variables) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return variable(node.id, frame)
        case ast.Attribute():
            return _attribute(_value(node.value, frame), node.attr)
        case ast.Subscript():
            return _item(_value(node.value, frame), _value(node.slice, frame))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.left, frame), _value(node.right, frame))
        case ast.Call():
            return _called(node, frame)
    raise UnknownValueError(ast.dump(node)[:60])


def variable(name: str, frame: Variables) -> Any:
    """Return a local or global variable of a frame.

    Raises:
        UnknownValueError: There is none.
    """
    for scope in (frame.f_locals, frame.f_globals):
        if name in scope:
            return scope[name]
    raise UnknownValueError(name)


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute that is stored, and not computed."""
    found = inspect.getattr_static(owner, name)
    if isinstance(owner, ModuleType | type) or not hasattr(type(found), "__get__"):
        return found
    raise UnknownValueError(name)


def _item(owner: Any, key: Any) -> Any:
    if type(owner) in (dict, list, tuple):
        return owner[key]
    raise UnknownValueError(repr(key))


def _called(node: ast.Call, frame: Variables) -> Any:
    """Return the result of a pure function, or of reading the environment."""
    if node.keywords:
        raise UnknownValueError(ast.dump(node)[:60])
    arguments = [_value(one, frame) for one in node.args]
    text = ast.unparse(node.func)
    if text in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
        return os.environ.get(*arguments)
    if text in _PURE and text not in frame.f_locals and text not in frame.f_globals:
        plain = (int, float, str, list, tuple, dict)
        if all(type(one) in plain for one in arguments):
            return _PURE[text](*arguments)
    raise UnknownValueError(text)
