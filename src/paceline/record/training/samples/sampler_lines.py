"""Find the lines of a sampler of the script that seed its random order, and return it."""

import dis
from typing import Any

from ..user_lines import is_users_file, place

_SEEDS = {"manual_seed", "seed", "default_rng", "Random", "RandomState"}
_SHUFFLES = {"randperm", "shuffle", "permutation", "sample", "permuted"}
_RETURNS = {"RETURN_VALUE", "YIELD_VALUE", "RETURN_GENERATOR"}


def lines_of_sampler(sampler: Any) -> dict[str, Any]:
    """Return the fields of ``LoaderFacts`` that are lines of the sampler's ``__iter__``.

    They are empty if the sampler is not one of the script.
    """
    code = getattr(getattr(type(sampler), "__iter__", None), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return {}
    seeds, shuffles, returns = [], [], []
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        at = getattr(one, "positions", None)
        line = at.lineno if at is not None and at.lineno else line
        if one.argval in _SEEDS and "LOAD" in one.opname:
            seeds.append(line)
        elif one.argval in _SHUFFLES and "LOAD" in one.opname:
            shuffles.append(line)
        elif one.opname in _RETURNS and line > code.co_firstlineno:
            returns.append(line)
    found = {"sampler_line": place(code.co_filename, code.co_firstlineno)}
    if seeds or shuffles:
        found["sampler_seed_line"] = place(code.co_filename, (seeds or shuffles)[0])
    if returns:
        found["sampler_return_line"] = place(code.co_filename, returns[0])
    return found
