"""Validation on repeated or missing samples."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .....record.training.facts.samples import Phase
from ...mistakes import MISTAKES, Finding, Nature
from ...passes import RankPass, Sample, Stream
from ...view import View, ranks_text
from .contents import LEAST_SAMPLES, UNIQUE, stream_of_one

EXACT_SAMPLERS = ("sequentialsampler", "randomsampler")  # mean the whole dataset
GATHERS = ("allgather", "gather")


def coverage(view: View) -> Iterator[Finding]:
    """Find validation passes that count samples several times, or leave some out.

    Those that have to be evaluated are known by their positions in a dataset, else by the contents
    of those that one process evaluates.
    """
    for stream in view.evaluation:
        sampler = stream.first.loader.sampler.lower()
        plans = _by_position(stream)
        if plans is not None:
            length = stream.first.loader.dataset_length or 0
            whole = _root_length(view, stream) if stream.has_root else length
            if sampler in EXACT_SAMPLERS or "distributed" in sampler:
                yield from _judged(view, stream, plans, whole)
        elif stream.first.loader.is_iterable:
            yield from _judged(view, stream, *_by_contents(view, stream))


def _by_position(stream: Stream) -> dict[int, list[Sample]] | None:
    """Return the positions of the samples by rank; None if they are not known."""
    if not (stream.shares_dataset or stream.has_root or len(stream.loaders) == 1):
        return None
    plans = {rank: stream.plan(made) for rank, made in stream.passes[0].ranks.items()}
    read: dict[int, list[Sample]] = {
        rank: [at for one in plan for at in one] for rank, plan in plans.items() if plan
    }
    is_known = bool(stream.first.loader.dataset_length) and None not in plans.values()
    return read if is_known and read else None


def _by_contents(view: View, stream: Stream) -> tuple[dict[int, list[Sample]], int]:
    """Return the samples by rank, and how many one process evaluates; {} and 0 if unknown."""
    of_one, first = stream_of_one(view, stream), stream.passes[0].ranks
    if of_one is None or not all(map(_is_whole, (*first.values(), of_one.first))):
        return {}, 0
    expected = of_one.read(0, of_one.first)
    read = {rank: stream.read(rank, one) for rank, one in first.items()}
    whole, union = set(expected), {one for each in read.values() for one in each}
    is_known = len(whole) >= max(UNIQUE * len(expected), LEAST_SAMPLES)
    is_same = len(union & whole) >= UNIQUE * len(union)
    return (read, len(whole)) if is_known and is_same else ({}, 0)


def _is_whole(one: RankPass) -> bool:
    return one.facts.is_complete or (one.facts.is_read and not one.facts.skipped)


def _root_length(view: View, stream: Stream) -> int:
    """Return the number of samples that parts of one dataset have to cover.

    That is the whole dataset if each rank has a part of its own, and little is left out that is
    not trained.
    """
    loaders = stream.loaders.values()
    covered = {at for one in loaders for at in one.subset or ()}
    trained = {
        at
        for other in view.training
        if other.first.loader.root_checksum == stream.first.loader.root_checksum
        for one in other.loaders.values()
        for at in one.subset or ()
    }
    whole = (stream.first.loader.root_length or 0) - len(trained - covered)
    is_by_rank = len({tuple(one.subset or ()) for one in loaders}) == len(loaders) > 1
    batch = stream.first.loader.batch_size or 1
    return whole if is_by_rank and whole - len(covered) < stream.size * batch else len(covered)


def _judged(
    view: View, stream: Stream, read: Mapping[int, Sequence[Sample]], length: int
) -> Iterator[Finding]:
    if not read:
        return
    loader, who = stream.first.loader, ranks_text(sorted(read), view.size)
    sets = [set(one) for one in read.values()]
    union = set().union(*sets)
    times = len(sets) if all(one == union for one in sets) else 1  # each rank validates the same
    repeated = sum(map(len, read.values())) - times * len(union)
    evaluations = [one for one in view.ranks[0].collectives if one.phase is Phase.EVALUATION]
    is_mended = any(one.removes_repeated for one in evaluations)
    if repeated and "random" not in loader.sampler.lower() and not is_mended:
        gathers = any(one.kind.replace("_", "").startswith(GATHERS) for one in evaluations)
        (example, most), *_ = Counter(at for one in read.values() for at in one).most_common(1)
        text = (
            f"{who} evaluate{'s' * (len(read) == 1)} {len(union)} samples in a validation pass, "
            f"and {repeated} of them once more"
        )
        text += f"; sample {example} {most} times." if isinstance(example, int) else "."
        if "distributed" in loader.sampler.lower():
            text += f" {loader.sampler} repeats samples so that all ranks have as many."
        yield Finding(
            MISTAKES["validation-repeats-samples"],
            stream.lines,
            text + " Does the script remove them after it gathers the results?" * gathers,
            values={"samples": length, "repeated": repeated},
            nature=Nature.QUESTION if gathers else None,
        )
    missing = length - len(union)
    if missing > 0:
        is_by_rank = len({tuple(one.subset or ()) for one in stream.loaders.values()}) > 1
        yield Finding(
            MISTAKES["validation-misses-samples"],
            [*([loader.split_line] if is_by_rank else []), *stream.lines],
            f"{who} leave{'s' * (len(read) == 1)} out {missing} of {length} samples in a validation"
            + (" pass: drop_last is set." if loader.drops_last else " pass."),
            values={"samples": length, "missing": missing},
        )
