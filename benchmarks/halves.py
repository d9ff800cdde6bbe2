"""The draw of the cases of a benchmark that are kept out while rules are made."""

import random
from collections.abc import Mapping, Sequence


def kept_out_ways(ways: Mapping[str, Sequence[str]], seed: int) -> dict[str, tuple[str, ...]]:
    """Return the ways of each kind that are kept out: half of them, and of three one or two."""
    draw, found = random.Random(seed), {}
    for kind, of_kind in ways.items():
        mixed = draw.sample(of_kind, len(of_kind))
        half = len(of_kind) // 2 + (len(of_kind) % 2) * draw.randrange(2)
        found[kind] = tuple(sorted(mixed[:half]))
    return found
