"""Which rows a rank holds, and which a window reads."""

import pytest

from paceline.parallel.spatial.partition import Partition, source_row, window, windows_of


def test_parts_of_uneven_rows_differ_by_one():
    partition = Partition.even("height", 11, 4)
    assert [end - first for first, end in partition.parts()] == [2, 3, 3, 3]


def test_scaled_borders_stay_in_order_and_parts_can_be_empty():
    partition = Partition.even("height", 12, 4).scaled(2)
    assert partition.rows == 2
    assert list(partition.bounds) == sorted(partition.bounds)


def test_padding_moves_no_row():
    assert Partition("width", (0, 4, 8)).padded(2, 1).bounds == (0, 6, 11)
    assert Partition("width", (0, 4, 8)).padded(-5, 0).bounds == (0, 0, 3)


def test_a_window_over_the_border_has_padding_and_rows_inside():
    # rows 0 and 1 of a 3 x 3 convolution with padding 1 read the rows -1 to 2
    assert windows_of((0, 2), 3, 1, 1, 1) == (-1, 3)
    found = window(-1, 3, 8)
    assert (found.needed, found.before, found.after) == (((0, 3),), 1, 0)


def test_a_window_within_the_padding_reads_nothing():
    found = window(9, 12, 8)
    assert (found.needed, found.before + found.after) == ((), 3)


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("circular", [6, 7, 0, 1]), ("reflect", [2, 1, 0, 1]), ("replicate", [0, 0, 0, 1])],
)
def test_padding_of_each_mode_shows_its_rows(mode, rows):
    assert [source_row(at, 8, mode) for at in range(-2, 2)] == rows


def test_circular_padding_asks_for_both_ends():
    found = window(-2, 3, 8, "circular")
    assert found.needed == ((0, 3), (6, 8))
    assert found.order == (3, 4, 0, 1, 2)
