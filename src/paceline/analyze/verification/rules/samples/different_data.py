"""Datasets that are made with other random numbers on each rank, and divided as if equal."""

from collections.abc import Iterator
from itertools import combinations

from ...mistakes import MISTAKES, Finding, Nature
from ...passes import Stream
from ...view import View

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # contents
LEAST_SHARE = 0.25  # of the samples of two ranks: labels in another order agree by chance
LEAST_PAIRS = 8  # samples that were read again, by the same rank and by another one


def different_data(view: View) -> Iterator[Finding]:
    """Find samples that a rank always reads alike, and other ranks always read differently.

    Augmentation differs from epoch to epoch, too, so it is none of these. Nor are datasets that
    each rank reads alone.
    """
    for stream in view.training:
        if len(stream.loaders) < view.size or not _is_divided(stream) or _draws(view, stream):
            continue
        columns, common, (pairs, compared) = _different_columns(stream)
        if not columns:
            continue
        count = len(stream.first.batches[0].contents)
        where = "" if len(columns) == count else f" in {_numbers(columns)} of {count} tensors"
        seeds = view.seed_lines_of_ranks()
        # Nothing is common, and the script seeds each rank differently: data of each rank.
        is_own = bool(seeds) and not common
        yield Finding(
            MISTAKES["different-random-numbers"],
            [*seeds[:1], *stream.lines],
            f"The samples of {stream.first.loader.dataset} differ between the ranks{where}: in "
            f"{pairs} of {compared} cases in which two ranks read the same position, while each "
            "rank reads a position alike in all epochs. The sampler divides the dataset as if it "
            "were the same on all ranks.",
            values={"positions": pairs},
            nature=Nature.QUESTION if is_own else None,
            remedy="make the dataset with the same seed on all ranks, or on one, and broadcast it; "
            "an order of a Python set also differs between processes",
        )


def _is_divided(stream: Stream) -> bool:
    first = stream.first.loader
    return (
        not first.is_iterable
        and len({(one.dataset, one.dataset_length) for one in stream.loaders.values()}) == 1
        and all(one.subset is None for one in stream.loaders.values())
        and stream.is_split_by_sampler()
    )


def _draws(view: View, stream: Stream) -> bool:
    """Return whether samples are read with random numbers: a cache may keep what they were."""
    return any(
        one.has_drawn and one.place == "fetch" and one.loader == stream.loaders[rank].key
        for rank in stream.loaders
        for one in view.ranks[rank].draws
    )


def _different_columns(stream: Stream) -> tuple[list[int], list[int], tuple[int, int]]:
    """Compare the samples that two ranks read at the same positions.

    Returns:
        The tensors of a batch that differ, those that never do, and the numbers of samples that
        differ and of those that were compared.
    """
    again: list[Pair] = []  # read by one rank
    across: list[Pair] = []  # read by two
    for each in stream.contents_by_position().values():
        for (rank, one), (other, two) in combinations(each, 2):
            (again if rank == other else across).append((one, two))
    if min(len(again), len(across)) < LEAST_PAIRS:
        return [], [], (0, 0)
    width = min(len(content) for pair in (*again, *across) for content in pair)
    found = [
        at
        for at in range(width)
        if all(one[at] == two[at] for one, two in again)
        and sum(one[at] != two[at] for one, two in across) >= LEAST_SHARE * len(across)
    ]
    common = [at for at in range(width) if all(one[at] == two[at] for one, two in across)]
    differing = sum(any(one[at] != two[at] for at in found) for one, two in across)
    return found, common, (differing, len(across))


def _numbers(columns: list[int]) -> str:
    return " and ".join(f"number {at + 1}" for at in columns)
