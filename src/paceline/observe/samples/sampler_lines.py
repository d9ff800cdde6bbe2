"""Find the lines of a sampler or stream of the script that seed its random order, and return it."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from ..user_lines import is_users_file, place

_SEEDS = {"manual_seed", "seed", "default_rng", "Random", "RandomState"}
SHUFFLES = {"randperm", "shuffle", "permutation", "permuted"}
_SAMPLES = {"sample"}  # which may be a method with another meaning
_RETURNS = {"RETURN_VALUE", "YIELD_VALUE", "RETURN_GENERATOR"}


def lines_of_sampler(sampler: Any) -> dict[str, Any]:
    """Return the fields of ``LoaderFacts`` that are lines of the sampler's ``__iter__``.

    They are empty if the sampler is not one of the script.
    """
    code = _code(type(sampler), "__iter__")
    if code is None:
        return {}
    returns = [
        line
        for one, line in _instructions(code)
        if one.opname in _RETURNS and line > code.co_firstlineno
    ]
    found = {"sampler_line": place(code.co_filename, code.co_firstlineno)} | _order_line(code)
    if returns:
        found["sampler_return_line"] = place(code.co_filename, returns[0])
    return found


def stream_lines(dataset: Any) -> dict[str, Any]:
    """Return the field of ``LoaderFacts`` for the line where a stream seeds its random order.

    It is looked for in ``__iter__`` and in the methods that this calls. Empty if none shuffles.
    """
    kind, names = type(dataset), ["__iter__"]
    seen: set[str] = set()
    while names:
        name = names.pop(0)
        seen.add(name)
        code = _code(kind, name)
        if code is None:
            continue
        if any(one.argval in SHUFFLES for one, _ in _instructions(code)):
            return _order_line(code)
        names += [x for x in code.co_names if x not in seen and _code(kind, x) is not None]
    return {}


def _code(kind: type, name: str) -> CodeType | None:
    """Return the code of a method if it is one of the script."""
    code: CodeType | None = getattr(getattr(kind, name, None), "__code__", None)
    return code if code is not None and is_users_file(code.co_filename) else None


def _order_line(code: CodeType) -> dict[str, Any]:
    """Return the first line that seeds, else the first that shuffles."""
    seeds, shuffles = [], []
    for one, line in _instructions(code):
        if one.argval in _SEEDS and "LOAD" in one.opname:
            seeds.append(line)
        elif one.argval in SHUFFLES | _SAMPLES and "LOAD" in one.opname:
            shuffles.append(line)
    first = (seeds or shuffles)[:1]
    return {"sampler_seed_line": place(code.co_filename, first[0])} if first else {}


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Yield each instruction with its line."""
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        at = getattr(one, "positions", None)
        line = at.lineno if at is not None and at.lineno else line
        yield one, line
