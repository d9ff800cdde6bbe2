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


PLACES = {
    rank: {"stage": rank // 4, "data": rank // 2 % 2, "tensor": rank % 2} for rank in range(8)
}


@pytest.mark.parametrize(
    ("ranks", "host", "text"),
    [
        ([5], "", "rank 5 (data 0, stage 1, tensor 1)"),
        ([5], "node1", "rank 5 (data 0, stage 1, tensor 1, node1)"),
        ([4, 5, 6, 7], "", "ranks 4-7 (stage 1)"),
        ([2, 6], "node1", "ranks 2, 6 (data 1, tensor 0, node1)"),
        (range(8), "", "ranks 0-7"),
        ([5, 9], "", "ranks 5, 9"),  # of rank 9 the place is not known
    ],
)
def test_ranks_are_named_with_the_place_that_they_share(ranks, host, text):
    assert named_ranks(ranks, places=PLACES, host=host) == text
