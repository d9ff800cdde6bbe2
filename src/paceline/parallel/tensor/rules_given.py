"""Rules of the user: patterns over module names, and kinds."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from .kinds import ALL_KINDS, REPLICATE, DivisionError, kinds_of, parse_kind, splits_of

Rules = Sequence[tuple[str, str]]


def kinds_from_rules(model: nn.Module, rules: Rules, ranks: int) -> dict[str, str]:
    """Return the kind of each module that rules divide.

    A rule with a module's whole name is preferred to a pattern.

    Raises:
        ValueError: A rule matches no module that can have its kind, rules contradict each other, or
            a layer can't be divided over the ranks.
    """
    found: dict[str, tuple[str, str]] = {}  # kind and pattern
    for pattern, kind in rules:
        _check_kind(pattern, kind)
        for name, module in _matching(model, pattern, kind):
            known = found.get(name)
            if known is not None and known[0] != kind and known[1] != name:
                if pattern == name:
                    known = None
                else:
                    raise _error(
                        f"{name} matches {known[1]!r} ({known[0]}) and {pattern!r} ({kind})",
                        f"a rule with its whole name, {name!r}: {kind!r}",
                    )
            if known is None:
                _check_division(name, module, kind, ranks)
                found[name] = (kind, pattern)
    return {name: kind for name, (kind, _) in found.items() if kind != REPLICATE}


def _check_kind(pattern: str, kind: str) -> None:
    try:
        parse_kind(kind)
    except ValueError:
        near = difflib.get_close_matches(kind, ALL_KINDS, n=1, cutoff=0.0)[0]
        raise _error(
            f"{pattern!r} has the kind {kind!r}; the kinds are {', '.join(ALL_KINDS)}",
            f"{pattern!r}: {near!r}",
        ) from None


def _matching(model: nn.Module, pattern: str, kind: str) -> list[tuple[str, nn.Module]]:
    """Return the modules of a pattern that can have the kind; raises ValueError for none."""
    named = [(name, module) for name, module in model.named_modules() if name]
    matched = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
    if not matched:
        layers = [name for name, module in named if kinds_of(module)]
        near = difflib.get_close_matches(pattern, layers or [n for n, _ in named], 1, 0.0)
        raise _error(f"{pattern!r} matches no module", f"{near[0] if near else '*'!r}")
    if kind == REPLICATE:
        return matched
    fitting = [(n, m) for n, m in matched if parse_kind(kind)[0] in kinds_of(m)]
    if not fitting:
        name, module = next(((n, m) for n, m in matched if kinds_of(m)), matched[0])
        kinds = [*kinds_of(module), REPLICATE]
        raise _error(
            f"{pattern!r}: {name} is a {type(module).__name__}, which has no kind {kind!r}",
            " or ".join(map(repr, kinds)),
        )
    return fitting


def _check_division(name: str, module: nn.Module, kind: str, ranks: int) -> None:
    try:
        splits_of(module, *parse_kind(kind), ranks)
    except DivisionError as error:
        raise _error(f"{name} can't be {kind!r}: {error}", f"{name!r}: 'replicate'") from None


def _error(problem: str, hint: str) -> ValueError:
    return ValueError(f"world.distribute: rules: {problem}. HINT: {hint}")
