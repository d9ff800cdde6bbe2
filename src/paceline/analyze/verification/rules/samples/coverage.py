"""Samples that N ranks together train or evaluate, beside those of one process, by their contents.

For scripts that index tensors themselves, and for streams: positions in a dataset are not known.
"""

from collections.abc import Iterator

from ...mistakes import MISTAKES, Finding
from ...passes import RankPass, Sample, Stream, streams
from ...view import View, ranks_text, unique
from .contents import LEAST_SAMPLES, UNIQUE, until_again


def never_trained(view: View) -> Iterator[Finding]:
    """Find samples that one process trains in an epoch, and no rank ever does."""
    if view.size < 2 or view.is_model_parallel:
        return
    for stream in view.training:
        if stream.first.loader.dataset or len(stream.loaders) < view.size:
            continue
        of_one = _of_one(view, stream)
        made = stream.passes[0].ranks
        epochs = [until_again(stream, rank, one.batches) for rank, one in made.items()]
        whole = set(until_again(of_one, 0, of_one.first.batches)) if of_one else set()
        ever = {one for rank, each in made.items() for one in stream.read(rank, each)}
        if not whole or not all(epochs) or len(ever & whole) < UNIQUE * len(ever):
            continue
        missing = len(whole - ever)
        largest = max(batch.samples for one in made.values() for batch in one.batches)
        if missing <= view.size * largest:  # a remainder
            continue
        yield Finding(
            MISTAKES["samples-never-trained"],
            unique([*stream.lines, stream.first.loader.sampler_seed_line]),
            f"One process trains {len(whole)} different samples in an epoch. {view.size} ranks "
            f"train {', '.join(str(len(each)) for each in epochs)} in one, and never "
            f"{missing} of them.",
            values={"missing": missing, "samples": len(whole)},
        )
        return


def evaluated(view: View) -> Iterator[Finding]:
    """Find samples that one process evaluates, and no rank does, or several ranks do."""
    if view.size < 2 or view.is_model_parallel:
        return
    for stream in view.evaluation:
        of_one = _of_one(view, stream) if stream.first.loader.is_iterable else None
        first = stream.passes[0].ranks
        if of_one is None or not all(map(_is_whole, (*first.values(), of_one.first))):
            continue
        expected = of_one.read(0, of_one.first)
        read = {rank: stream.read(rank, one) for rank, one in first.items()}
        whole, union = set(expected), {one for each in read.values() for one in each}
        is_known = len(whole) >= max(UNIQUE * len(expected), LEAST_SAMPLES)
        if not is_known or len(union & whole) < UNIQUE * len(union):
            continue
        yield from _judged(view, stream, read, len(whole - union), len(whole))


def _judged(
    view: View, stream: Stream, read: dict[int, list[Sample]], missing: int, whole: int
) -> Iterator[Finding]:
    who = ranks_text(sorted(read), view.size)
    union = {one for each in read.values() for one in each}
    is_divided = len({frozenset(each) for each in read.values()}) > 1
    repeated = sum(map(len, read.values())) - len(union)
    if missing:
        yield Finding(
            MISTAKES["validation-misses-samples"],
            unique(stream.lines),
            f"{who} evaluate{'s' * (len(read) == 1)} {len(union)} of the {whole} samples that one "
            f"process evaluates: {missing} {'is' if missing == 1 else 'are'} left out.",
            values={"samples": whole, "missing": missing},
        )
    elif is_divided and repeated:
        yield Finding(
            MISTAKES["validation-repeats-samples"],
            unique(stream.lines),
            f"{who} evaluate {len(union)} samples, {repeated} of them once more.",
            values={"samples": whole, "repeated": repeated},
        )


def _of_one(view: View, stream: Stream) -> Stream | None:
    """Return the stream of the unchanged script on one rank."""
    alone, loader = view.runs.alone, stream.first.loader
    found = streams([alone], stream.phase) if alone is not None else []
    return next(
        (
            one
            for one in found
            if (one.first.loader.line, one.first.loader.dataset) == (loader.line, loader.dataset)
        ),
        None,
    )


def _is_whole(one: RankPass) -> bool:
    return one.facts.is_complete or (one.facts.is_read and not one.facts.skipped)
