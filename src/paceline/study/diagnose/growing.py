"""Notes on containers of the script that grow in each step and keep tensors."""

import re
from collections.abc import Sequence
from typing import Any

from ...plurals import counted, named_ranks

MAX_CODE_CHARS = 80


def growing_notes(records: Sequence[Any], source: str) -> list[str]:
    """Return a note for each container that grows, with the line that fills it.

    source: Source code of the script.
    """
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for record in records:
        for one in record.meta.get("rung", {}).get("growing", []):
            found.setdefault(one["name"], (one, []))[1].append(record.rank)
    return [_note(one, ranks, len(records), source) for one, ranks in found.values()]


def _note(one: dict[str, Any], ranks: list[int], size: int, source: str) -> str:
    on = "" if len(ranks) == size else f" of {named_ranks(ranks)}"
    added = counted(one["elements"], "element")
    place = _line_that_fills(one["name"], source)
    text = f"the {one['kind']} {one['name']}{on} grows by {added} in each step{place}"
    kib = f"{one['bytes'] / 1024:,.0f} KiB"
    if one["graphs"]:
        hint = "append loss.item() or tensor.detach(), or clear it in each step"
        return f"{text} and keeps tensors with their graphs: memory grows. HINT: {hint}"
    hint = "limit its length (collections.deque(maxlen=N)), or clear it"
    return f"{text} and keeps {kib} of tensors per step: memory grows. HINT: {hint}"


def _line_that_fills(name: str, source: str) -> str:
    """Return the first line that adds to the container, in parentheses; "" if there is none."""
    variable = re.escape(name.partition(" in ")[0].rpartition(".")[2])
    adds = rf"\b{variable}(\.(append|appendleft|add|extend|insert|update|setdefault)\(|"
    adds += r"\s*\+=|\[[^\]]*\]\s*=(?!=))"
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(adds, line):
            return f" (line {number}: {line.strip()[:MAX_CODE_CHARS]})"
    return ""
