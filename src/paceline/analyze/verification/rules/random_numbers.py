"""Random numbers that are the same where they must differ, or differ where they must agree."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from ....observe.facts.events import DrawFacts
from ....observe.facts.samples import Phase
from ..joined_runs import JoinedRuns, ranks_text
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..passes import Stream

MIN_EQUAL_DRAWS = 2  # draws that must be equal
MOST_OF_DRAWS = 0.9  # of the compared draws
LEAST_SHARE = 0.25  # of the samples of two ranks: labels in another order agree by chance
LEAST_PAIRS = 8  # samples that were read again, by the same rank and by another one
KINDS = {"torch": "torch", "cuda": "torch (CUDA)", "numpy": "numpy", "python": "random"}
DOINGS = {
    "fetch": "the dataset (augmentation, noise or sampling)",
    "forward": "the model's forward (dropout or noise)",
    "loop": "the training loop (noise or augmentation)",
}

Key = tuple[object, ...]

MISTAKES = by_id(
    Mistake(
        "same-random-numbers",
        "Random numbers are the same where they have to differ",
        "states of the random number generators of ranks, workers and epochs",
        "add the rank (and the worker's number) to the seed after the model is made",
    ),
    Mistake(
        "different-random-numbers",
        "Random numbers differ between ranks where they have to agree",
        "samples that one rank trains and another validates or reads otherwise; buffers",
        "use a generator with the same seed on all ranks, such as torch.Generator().manual_seed(0)",
        explains=ids(
            "samples-repeated samples-never-trained validation-misses-samples "
            "validation-repeats-samples gradients-differ state-differs"
        ),
    ),
)


def same_on_ranks(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks whose generators are in the same state when they draw for different samples."""
    streams = {one.key: max(one.workers, 1) for one in joined.ranks[0].loaders if one.is_iterable}
    training = [facts.passes(Phase.TRAINING) for facts in joined.ranks]
    for place in DOINGS:
        for generator in _generators(joined, place):
            by_rank = [
                {
                    _key(one): one
                    for one in facts.draws
                    if one.place == place and one.generator == generator and one.has_drawn
                    if place != "fetch" or (one.loader, one.pass_number) in training[rank]
                    # In its first batch, a stream may draw an order that all ranks share.
                    if place != "fetch" or one.number >= streams.get(one.loader, 0)
                }
                for rank, facts in enumerate(joined.ranks)
            ]
            groups = [
                pair
                for pair in combinations(range(joined.size), 2)
                if _are_equal(by_rank[pair[0]], by_rank[pair[1]])
            ]
            if groups:
                yield _on_ranks(joined, place, generator, by_rank[groups[0][0]], groups)


def _generators(joined: JoinedRuns, place: str) -> list[str]:
    """Return the generators that are used at a place, the global ones first."""
    used = {one.generator for one in joined.ranks[0].draws if one.place == place and one.has_drawn}
    return sorted(used, key=lambda name: (name not in KINDS, name))


def _called(generator: str) -> str:
    """Return a generator in words: one of the script has the name "KIND:VARIABLE"."""
    kind, _, variable = generator.partition(":")
    return f"{variable} ({KINDS.get(kind, kind)})" if variable else KINDS.get(kind, kind)


def same_in_workers(joined: JoinedRuns) -> Iterator[Finding]:
    """Find workers of a loader, or epochs, whose samples are drawn with the same numbers."""
    for rank, facts in enumerate(joined.ranks):
        draws: dict[tuple[int, str], list[DrawFacts]] = defaultdict(list)
        for one in facts.draws:
            if one.place == "fetch" and one.has_drawn:
                draws[one.loader, one.generator].append(one)
        for (key, generator), found in draws.items():
            loader = facts.loader(key)
            if loader is None or not any(p.phase is Phase.TRAINING for p in loader.passes):
                continue
            text = _of_equal_draws(found)
            if text:
                lines = [_line(found), loader.line]
                yield Finding(
                    MISTAKES["same-random-numbers"],
                    lines,
                    f"On rank {rank}, {text} with the same numbers of {_called(generator)}: "
                    "different samples get the same augmentation or noise.",
                    ranks=[] if rank == 0 else [rank],
                    values={"draws": len(found)},
                    remedy="let worker_init_fn seed each worker by torch.initial_seed(), which "
                    "differs by worker and epoch, or leave it out",
                )


def different_split(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks that split a dataset differently: one trains what another one validates."""
    pairs = [(one, other) for one in joined.training for other in joined.evaluation]
    for stream, other in pairs:
        if not (stream.has_root and other.has_root) or other.first.loader.root_checksum != (
            stream.first.loader.root_checksum
        ):
            continue
        trained = {rank: set(one.subset or ()) for rank, one in stream.loaders.items()}
        tested = {rank: set(one.subset or ()) for rank, one in other.loaders.items()}
        for a, b in combinations(sorted(trained), 2):
            own = any(trained[one] & tested.get(one, set()) for one in (a, b))
            mixed = (trained[a] & tested.get(b, set())) | (trained[b] & tested.get(a, set()))
            if mixed and not own:
                lines = [stream.first.loader.split_line, *joined.seed_lines_of_ranks()[:1]]
                yield Finding(
                    MISTAKES["different-random-numbers"],
                    [*lines, *stream.lines, *other.lines],
                    f"Ranks {a} and {b} split the dataset differently: {len(mixed)} samples are "
                    "trained on one of them and validated on the other.",
                    ranks=[a, b],
                    values={"samples": len(mixed)},
                    remedy="split with a generator that has the same seed on all ranks, such as "
                    "random_split(..., generator=torch.Generator().manual_seed(0))",
                )


def _key(one: DrawFacts) -> Key:
    return (one.worker, one.loader, one.pass_number, one.number)


def _are_equal(one: dict[Key, DrawFacts], two: dict[Key, DrawFacts]) -> bool:
    both = one.keys() & two.keys()
    equal = sum(one[key].state == two[key].state for key in both)
    return equal >= MIN_EQUAL_DRAWS and equal >= MOST_OF_DRAWS * len(both)


def _on_ranks(
    joined: JoinedRuns,
    place: str,
    generator: str,
    draws: dict[Key, DrawFacts],
    groups: Sequence[tuple[int, int]],
) -> Finding:
    ranks = sorted({rank for pair in groups for rank in pair})
    workers = any(one.worker is not None for one in draws.values())
    found = list(draws.values())
    text = (
        f"{ranks_text(ranks, joined.size)} draw the same random numbers of {_called(generator)} in "
        f"{DOINGS[place]}, for different samples"
    )
    text += ", in workers with the same number." if workers else "."
    # Ranks may share numbers of a generator of their own on purpose, but not for samples.
    loader = joined.ranks[0].loader(found[0].loader) if place == "fetch" else None
    is_stream = loader is not None and loader.is_iterable
    is_shared = ":" in generator and (place != "fetch" or is_stream)
    loaders = [loader.line] if loader is not None else []
    return Finding(
        MISTAKES["same-random-numbers"],
        [*joined.seed_lines(generator, are_equal=True)[:1], _line(found), *loaders],
        text,
        ranks=ranks,
        values={"draws": len(found)},
        nature=Nature.QUESTION if is_shared else None,
        remedy="seed with seed + rank after the model is made"
        + (": the seeds of the workers follow from it" if workers else ""),
    )


def _line(draws: Sequence[DrawFacts]) -> str:
    return next((one.line for one in draws if one.line), "")


def _of_equal_draws(draws: Sequence[DrawFacts]) -> str:
    """Return which workers, or which epochs, draw the same, in words; "" if none do."""
    by_worker: dict[int, dict[Key, int]] = defaultdict(dict)
    by_pass: dict[int, dict[Key, int]] = defaultdict(dict)
    for one in draws:
        by_pass[one.pass_number][one.worker, one.number] = one.state
        if one.worker is not None:
            nth = sum(key[0] == one.pass_number for key in by_worker[one.worker])
            by_worker[one.worker][one.pass_number, nth] = one.state
    for what, states, first, least in (
        ("workers", by_worker, 0, 1),
        ("epochs", by_pass, 1, MIN_EQUAL_DRAWS),
    ):
        for a, b in combinations(sorted(states), 2):
            both = states[a].keys() & states[b].keys()
            equal = sum(states[a][key] == states[b][key] for key in both)
            if equal >= least and equal >= MOST_OF_DRAWS * len(both):
                return f"{what} {a + first} and {b + first} load samples"
    return ""


def different_data(joined: JoinedRuns) -> Iterator[Finding]:
    """Find samples that a rank always reads alike, and other ranks always read differently.

    Augmentation differs from epoch to epoch, too, so it is none of these. Nor are datasets that
    each rank reads alone.
    """
    for stream in joined.training:
        if len(stream.loaders) < joined.size or not _is_divided(stream) or _draws(joined, stream):
            continue
        columns, common, (pairs, compared) = _different_columns(stream)
        if not columns:
            continue
        count = len(stream.first.batches[0].contents)
        where = "" if len(columns) == count else f" in {_numbers(columns)} of {count} tensors"
        seeds = joined.seed_lines_of_ranks()
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


def _draws(joined: JoinedRuns, stream: Stream) -> bool:
    """Return whether samples are read with random numbers: a cache may keep what they were."""
    return any(
        one.has_drawn and one.place == "fetch" and one.loader == stream.loaders[rank].key
        for rank in stream.loaders
        for one in joined.ranks[rank].draws
    )


def _different_columns(stream: Stream) -> tuple[list[int], list[int], tuple[int, int]]:
    """Compare the samples that two ranks read at the same positions.

    Returns:
        The tensors of a batch that differ, those that never do, and the numbers of samples that
        differ and of those that were compared.
    """
    again: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # contents; read by one rank
    across = again[:0]  # read by two
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
