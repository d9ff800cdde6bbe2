"""Lists of ranks in messages."""

import pytest

from paceline.plurals import named_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ({1, 0}, "ranks 0-1"),
        ([7, 0, 1, 2, 3], "ranks 0-3, 7"),
        (range(2000), "ranks 0-1999"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([*range(0, 16, 2), *range(20, 2020)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2,000 more"),
    ],
)
def test_ranks_are_named_as_ranges(ranks, text):
    assert named_ranks(ranks) == text
