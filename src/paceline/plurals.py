"""Counts, ordinal numbers and lists of ranks in messages: "4 ranks", "2nd step", "ranks 0-3, 7"."""

from collections.abc import Collection, Mapping

# Of ranks: the position along each axis of a mesh (parallel/mesh.py)
Places = Mapping[int, Mapping[str, int]]


def counted(number: float, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 rank", "4 ranks", "12,000 samples", "2.5 files".

    plural: Needed where it is not the noun with an s: "batches".
    """
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {noun if text == '1' else plural or noun + 's'}"


def ordinal(number: int) -> str:
    """Format an ordinal number: "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number:,}{ending or 'th'}"


def format_ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: [0, 1, 2, 5] as "0-2,5"."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number != previous + 1:
            parts.append(f"{start}-{previous}" if start != previous else f"{start}")
            start = None
        if start is None:
            start = number
        previous = number
    return ",".join(parts)


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of a result of ``format_ranges``."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def named_ranks(
    ranks: Collection[int], limit: int = 8, places: Places | None = None, host: str = ""
) -> str:
    """Format ranks as ranges: "rank 3", "ranks 0-3, 7", "ranks 0-3, 7 and 12 more".

    Args:
        limit: Maximum number of ranges; the ranks of the others are counted.
        places: What all the ranks share of them is added: "rank 5 (data 1, stage 0)",
            "ranks 4-7 (stage 1)".
        host: Their host, which is added: "rank 5 (data 1, stage 0, node7)".
    """
    parts = format_ranges(list(ranks)).split(",")
    more = len(ranks) - sum(map(_length, parts[:limit]))
    text = ", ".join(parts[:limit]) + (f" and {more:,} more" if more else "")
    details = ", ".join(filter(None, (shared_place(ranks, places or {}), host)))
    where = f" ({details})" if details else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{where}"


def shared_place(ranks: Collection[int], places: Places) -> str:
    """Return the positions that all these ranks share: "data 1, stage 0"; "" for none."""
    each = [places.get(rank, {}) for rank in ranks]
    shared = [
        (axis, at)
        for axis, at in (each[0].items() if each else ())
        if all(place.get(axis) == at for place in each)
    ]
    shared.sort(key=lambda one: one[0] != "data")
    return ", ".join(f"{axis} {at}" for axis, at in shared)


def _length(numbers: str) -> int:
    first, _, last = numbers.partition("-")
    return int(last or first) - int(first) + 1
