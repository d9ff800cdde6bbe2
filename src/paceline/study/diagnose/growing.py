"""Notes on containers of the script that grow in each step and keep tensors."""

from collections.abc import Sequence
from typing import Any

from ...plurals import counted, named_ranks


def growing_notes(records: Sequence[Any]) -> list[str]:
    """Return a note for each container that grows, by name; the ranks have it alike or not."""
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for record in records:
        for one in record.meta.get("rung", {}).get("growing", []):
            found.setdefault(one["name"], (one, []))[1].append(record.rank)
    return [_note(one, ranks, len(records)) for one, ranks in found.values()]


def _note(one: dict[str, Any], ranks: list[int], size: int) -> str:
    on = "" if len(ranks) == size else f" of {named_ranks(ranks)}"
    added = counted(one["elements"], "element")
    text = f"the {one['kind']} {one['name']}{on} grows by {added} in each step"
    kib = counted(one["bytes"] / 1024, "KiB", "KiB")
    if one["graphs"]:
        hint = "append loss.item() or tensor.detach(), or clear it in each step"
        return f"{text} and keeps tensors with their graphs: memory grows. HINT: {hint}"
    hint = "limit its length (collections.deque(maxlen=N)), or clear it"
    return f"{text} and keeps {kib} of tensors per step: memory grows. HINT: {hint}"
