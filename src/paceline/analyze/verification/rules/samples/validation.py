"""Validation on repeated or missing samples."""

from collections import Counter
from collections.abc import Iterator

from .....record.training.facts.samples import Phase
from ...mistakes import MISTAKES, Finding, Nature
from ...passes import Stream
from ...view import View, ranks_text, unique

EXACT_SAMPLERS = ("sequentialsampler", "randomsampler")  # mean the whole dataset
GATHERS = ("allgather", "gather")


def coverage(view: View) -> Iterator[Finding]:
    """Find validation passes that count samples several times, or leave some out."""
    for stream in view.evaluation:
        loader = stream.first.loader
        if not (stream.shares_dataset or stream.has_root or len(stream.loaders) == 1):
            continue
        plans = {}
        for rank, made in stream.passes[0].ranks.items():
            plan = stream.plan(made)
            if plan is not None:
                plans[rank] = [at for batch in plan for at in batch]
        length = loader.dataset_length
        if len(plans) < len(stream.loaders) or not length or not any(plans.values()):
            continue
        if stream.has_root:
            length = _root_length(view, stream)
        yield from _judged(view, stream, plans, length)


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
    view: View, stream: Stream, plans: dict[int, list[int]], length: int
) -> Iterator[Finding]:
    sampler = stream.first.loader.sampler
    sets = [set(one) for one in plans.values()]
    union = set().union(*sets)
    if all(one == union for one in sets):  # each rank validates the same
        repeated = sum(len(one) for one in plans.values()) - len(plans) * len(union)
    else:
        repeated = sum(len(one) for one in plans.values()) - len(union)
    missing = length - len(union)
    known = sampler.lower() in EXACT_SAMPLERS or "distributed" in sampler.lower()
    is_mended = any(
        one.removes_repeated and one.phase is Phase.EVALUATION for one in view.ranks[0].collectives
    )
    if repeated and known and "random" not in sampler.lower() and not is_mended:
        gathers = any(
            one.phase is Phase.EVALUATION and one.kind.replace("_", "").startswith(GATHERS)
            for one in view.ranks[0].collectives
        )
        counts = Counter(at for one in plans.values() for at in one)
        example = counts.most_common(1)[0][0]
        text = (
            f"A validation pass of {len(plans)} ranks evaluates {len(union)} samples, and "
            f"{repeated} of them once more; sample {example} {counts[example]} times."
        )
        text += f" {sampler} repeats samples so that all ranks have as many." * (
            "distributed" in sampler.lower()
        )
        if gathers:
            text += " Does the script remove them after it gathers the results?"
        yield Finding(
            MISTAKES["validation-repeats-samples"],
            unique(stream.lines),
            text,
            values={"samples": length, "repeated": repeated},
            nature=Nature.QUESTION if gathers else None,
        )
    if missing > 0 and known:
        drops = stream.first.loader.drops_last
        is_by_rank = len({tuple(one.subset or ()) for one in stream.loaders.values()}) > 1
        split = [stream.first.loader.split_line] if is_by_rank else []
        who = ranks_text(sorted(plans), view.size).lower()
        text = f"A validation pass on {who} leaves out {missing} of {length} samples"
        text += ": drop_last is set." if drops else "."
        yield Finding(
            MISTAKES["validation-misses-samples"],
            unique([*split, *stream.lines]),
            text,
            values={"samples": length, "missing": missing},
        )
