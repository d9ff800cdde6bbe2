"""Random numbers that are the same where they must differ, or differ where they must agree."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from ....record.training.facts.events import DrawFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding, Nature
from ..view import View, ranks_text

LEAST = 2  # draws that must be equal
MOSTLY = 0.9  # of the compared draws
KINDS = {"torch": "torch", "cuda": "torch (CUDA)", "numpy": "numpy", "python": "random"}
DOINGS = {
    "fetch": "the dataset (augmentation, noise or sampling)",
    "forward": "the model's forward (dropout or noise)",
    "loop": "the training loop (noise or augmentation)",
}

Key = tuple[object, ...]


def same_on_ranks(view: View) -> Iterator[Finding]:
    """Find ranks whose generators are in the same state when they draw for different samples."""
    streams = {one.key: max(one.workers, 1) for one in view.ranks[0].loaders if one.is_iterable}
    training = {
        (rank, loader.key, one.number)
        for rank, facts in enumerate(view.ranks)
        for loader in facts.loaders
        for one in loader.passes
        if one.phase is Phase.TRAINING
    }
    for place in DOINGS:
        for generator in _generators(view, place):
            by_rank = [
                {
                    _key(one): one
                    for one in facts.draws
                    if one.place == place and one.generator == generator and one.has_drawn
                    if place != "fetch" or (rank, one.loader, one.pass_number) in training
                    # In its first batch, a stream may draw an order that all ranks share.
                    if place != "fetch" or one.number >= streams.get(one.loader, 0)
                }
                for rank, facts in enumerate(view.ranks)
            ]
            groups = [
                pair
                for pair in combinations(range(view.size), 2)
                if _are_equal(by_rank[pair[0]], by_rank[pair[1]])
            ]
            if groups:
                yield _on_ranks(view, place, generator, by_rank[groups[0][0]], groups)


def _generators(view: View, place: str) -> list[str]:
    """Return the generators that are used at a place, the global ones first."""
    used = {one.generator for one in view.ranks[0].draws if one.place == place and one.has_drawn}
    return sorted(used, key=lambda name: (name not in KINDS, name))


def _called(generator: str) -> str:
    """Return a generator in words: one of the script has the name "KIND:VARIABLE"."""
    kind, _, variable = generator.partition(":")
    return f"{variable} ({KINDS.get(kind, kind)})" if variable else KINDS.get(kind, kind)


def same_in_workers(view: View) -> Iterator[Finding]:
    """Find workers of a loader, or epochs, whose samples are drawn with the same numbers."""
    for rank, facts in enumerate(view.ranks):
        draws: dict[tuple[int, str], list[DrawFacts]] = defaultdict(list)
        for one in facts.draws:
            if one.place == "fetch" and one.has_drawn:
                draws[one.loader, one.generator].append(one)
        for (key, generator), found in draws.items():
            loader = next((one for one in facts.loaders if one.key == key), None)
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


def different_split(view: View) -> Iterator[Finding]:
    """Find ranks that split a dataset differently: one trains what another one validates."""
    pairs = [(one, other) for one in view.training for other in view.evaluation]
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
                lines = [stream.first.loader.split_line, *view.seed_lines_of_ranks()[:1]]
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
    return equal >= LEAST and equal >= MOSTLY * len(both)


def _on_ranks(
    view: View,
    place: str,
    generator: str,
    draws: dict[Key, DrawFacts],
    groups: Sequence[tuple[int, int]],
) -> Finding:
    ranks = sorted({rank for pair in groups for rank in pair})
    workers = any(one.worker is not None for one in draws.values())
    found = list(draws.values())
    loaders = [
        loader.line
        for loader in view.ranks[0].loaders
        if place == "fetch" and loader.key == found[0].loader
    ]
    text = (
        f"{ranks_text(ranks, view.size)} draw the same random numbers of {_called(generator)} in "
        f"{DOINGS[place]}, for different samples"
    )
    text += ", in workers with the same number." if workers else "."
    # Ranks may share numbers of a generator of their own on purpose, but not for samples.
    loader = next((x for x in view.ranks[0].loaders if x.key == found[0].loader), None)
    is_stream = loader is not None and loader.is_iterable
    is_shared = ":" in generator and (place != "fetch" or is_stream)
    return Finding(
        MISTAKES["same-random-numbers"],
        [*view.seed_lines(generator, are_equal=True)[:1], _line(found), *loaders],
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
    for what, states, first, least in (("workers", by_worker, 0, 1), ("epochs", by_pass, 1, LEAST)):
        for a, b in combinations(sorted(states), 2):
            both = states[a].keys() & states[b].keys()
            equal = sum(states[a][key] == states[b][key] for key in both)
            if equal >= least and equal >= MOSTLY * len(both):
                return f"{what} {a + first} and {b + first} load samples"
    return ""
