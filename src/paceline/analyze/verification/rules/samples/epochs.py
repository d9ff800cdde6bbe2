"""Which samples the ranks train: the same ones, some several times, some never, in which order."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from ...mistakes import MISTAKES, Finding, Nature
from ...passes import JointPass, RankPass, Sample, Stream
from ...view import View, ranks_text
from .contents import DISTINCT, LEAST_SAMPLES, by_contents, is_regular, stream_of_one

MOSTLY = 0.9  # of the batches or samples
OVERLAP = 0.02  # of the samples of an epoch
REDRAWN = 0.02  # of the samples that a sampler with replacement draws again on one rank
BY_BATCH = ("batch", "shard")  # samplers that give ranks whole batches (accelerate)
CHOOSING = ("weighted", "subset", "balanced", "imbalanced", "curriculum")  # samplers that leave out


def same_samples(view: View) -> Iterator[Finding]:
    """Find ranks that train the same samples."""
    for stream in view.training:
        if len(stream.loaders) < 2 or stream.divides_batches:
            continue
        if (found := _same_batches(stream, view)) is not None:
            yield found


def repeated_or_missing(view: View) -> Iterator[Finding]:
    """Find epochs in which samples occur several times, or not at all."""
    for stream in view.training:
        if stream.divides_batches:
            continue
        if not (stream.shares_dataset or stream.has_root):
            yield from by_contents(view, stream)
            continue
        plans = [plan for one in stream.passes if (plan := _plans(stream, one))]
        if not plans:
            continue
        yield from _repeated(view, stream, plans)
        yield from _missing(view, stream, plans)


def epoch_not_set(view: View) -> Iterator[Finding]:
    """Find a random order that is the same in all epochs."""
    for stream in view.training:
        orders = []
        for one in stream.passes:
            rank = min(one.ranks)
            orders.append(_order(stream, one.ranks[rank]))
        known = [order for order in orders if order]
        loader = stream.first.loader
        is_shuffled_stream = loader.is_iterable and bool(loader.sampler_seed_line)
        may_differ = loader.sampler_has_epoch or is_shuffled_stream
        if len(known) < 2 or (loader.is_iterable and not may_differ):
            continue
        if any(order != known[0] for order in known[1:]):
            continue
        if not loader.is_iterable and is_regular(known[0]):
            continue
        what = loader.dataset if loader.is_iterable else loader.sampler
        epochs = f"{len(known)} epochs" if len(known) > 2 else "both epochs"
        has_epoch = loader.sampler_has_epoch
        set_to = {one.ranks[min(one.ranks)].facts.sampler_epoch for one in stream.passes}
        # The script sets the epoch of its own sampler, which does not use it.
        ignored = [loader.sampler_seed_line, loader.sampler_line] if len(set_to) > 1 else []
        if is_shuffled_stream:
            ignored = [loader.sampler_seed_line]
        reason = (
            f"set_epoch of the {what} was not called with another epoch."
            if has_epoch
            else f"the order of {what or 'the loader'} does not depend on the epoch."
        )
        yield Finding(
            MISTAKES["epoch-not-set"],
            [*ignored, stream.first.facts.line, loader.line],
            f"{ranks_text(sorted(stream.loaders), view.size)} trained "
            f"{len(known[0])} samples each in the same random order in {epochs}: {reason}",
            values={"epochs": len(known), "samples": len(known[0])},
            # A stream has set_epoch also if it is read in order.
            nature=Nature.QUESTION if loader.is_iterable and not is_shuffled_stream else None,
            remedy="" if has_epoch else "make the order depend on the epoch",
        )


def _same_batches(stream: Stream, view: View) -> Finding | None:
    """Return a finding if two ranks read the same batches at the same time."""
    groups = [
        pair
        for pair in combinations(sorted(stream.loaders), 2)
        if _share_of_equal_batches(stream, *pair) >= MOSTLY
    ]
    if not groups:
        return None
    ranks = sorted({rank for pair in groups for rank in pair})
    everything = len(groups) == view.size * (view.size - 1) // 2
    sharded = any(model.is_sharded for model in view.ranks[0].models)
    loader = stream.loaders[ranks[0]]
    how = "" if everything else f" ({'; '.join(f'{a} and {b}' for a, b in groups[:4])})"
    samples = sum(batch.samples for batch in stream.passes[0].ranks[ranks[0]].batches)
    sampler = f" The sampler is {loader.sampler}." if loader.sampler else ""
    return Finding(
        MISTAKES["same-samples"],
        [loader.sampler_return_line, *stream.lines],
        f"{ranks_text(ranks, view.size)} trained the same samples in the same order{how}, "
        f"{samples} of each in the first epoch as far as it was run: a step computes the gradient "
        f"of one rank's batch several times.{sampler}",
        ranks=ranks,
        values={"samples": samples, "pairs": len(groups)},
        nature=Nature.QUESTION if sharded and not everything else None,
    )


def _share_of_equal_batches(stream: Stream, one: int, two: int) -> float:
    equal = compared = seen = 0
    for made in stream.passes:
        if one not in made.ranks or two not in made.ranks:
            continue
        a, b = made.ranks[one], made.ranks[two]
        for first, second in zip(a.batches, b.batches, strict=False):
            left = stream.samples(one, first, a.loader)
            right = stream.samples(two, second, b.loader)
            if left is None or right is None or not _identify(left):
                continue
            compared += 1
            equal += left == right
            seen += len(left)
    return equal / compared if compared and seen >= LEAST_SAMPLES else 0.0


def _identify(samples: Sequence[Sample]) -> bool:
    """Return whether samples can be told apart by their contents."""
    if samples and isinstance(samples[0], int):
        return True
    return len(set(samples)) >= max(DISTINCT * len(samples), 1)


def _plans(stream: Stream, one: JointPass) -> dict[int, list[int]]:
    """Return the samples of a pass by rank; empty unless all ranks' are known."""
    plans: dict[int, list[int]] = {}
    for rank, made in one.ranks.items():
        plan = stream.plan(made)
        if plan is None:
            return {}
        plans[rank] = [at for batch in plan for at in batch]
    return plans if any(plans.values()) else {}


def _padding(stream: Stream) -> int:
    """Return how many samples a sampler may repeat, or leave out, to give ranks equal parts."""
    batch = stream.first.loader.batch_size or max(
        (one.samples for one in stream.first.batches), default=1
    )
    return stream.size * batch - 1


def _repeated(
    view: View, stream: Stream, plans: Sequence[dict[int, list[int]]]
) -> Iterator[Finding]:
    plan = plans[0]
    counts = Counter(at for one in plan.values() for at in one)
    extra = sum(count - 1 for count in counts.values())
    within = {rank: len(one) - len(set(one)) for rank, one in plan.items()}
    across = extra - sum(within.values())
    loader = stream.first.loader
    is_padded_by_batch = loader.batch_size is None or any(
        word in loader.sampler.lower() for word in BY_BATCH
    )
    padding = _padding(stream) if is_padded_by_batch else stream.size - 1
    if extra <= padding and max(counts.values()) <= 2:
        return
    uniform = min(counts.values())
    total = sum(map(len, plan.values()))
    draws_again = sum(within.values()) >= max(REDRAWN * total, 1)
    if (draws_again or _chooses(stream)) and uniform < 2:
        return  # a sampler that draws samples again
    if across < OVERLAP * total and sum(within.values()) < OVERLAP * total:
        return
    where = "on several ranks" if across >= sum(within.values()) else "on one rank"
    most, times = counts.most_common(1)[0]
    is_whole = not sum(within.values()) and uniform == stream.size == times
    is_whole = is_whole and len(counts) >= MOSTLY * (loader.dataset_length or 0)
    lines = [loader.sampler_return_line, *stream.lines]
    if not is_whole and across and not any(map(is_regular, plan.values())):  # of other orders
        lines = [*view.seed_lines_of_ranks()[:1], loader.sampler_seed_line, *lines]
    yield Finding(
        MISTAKES["same-samples" if is_whole else "samples-repeated"],
        lines,
        f"An epoch trains {len(counts)} different samples, and {extra} of {total} times a sample "
        f"that was trained before, {where}; sample {most} {times} times.",
        values={"different": len(counts), "repeated": extra, "trained": total},
    )


def _missing(
    view: View, stream: Stream, plans: Sequence[dict[int, list[int]]]
) -> Iterator[Finding]:
    loader = stream.first.loader
    length = loader.root_length if stream.has_root else loader.dataset_length
    if length is None or _chooses(stream) or (stream.has_root and not _covers_by_rank(stream)):
        return
    sets = [set().union(*map(set, plan.values())) for plan in plans]
    ever = set().union(*sets)
    within = sum(len(one) - len(set(one)) for one in plans[0].values())
    if within > OVERLAP * sum(map(len, plans[0].values())):
        return  # drawn with replacement
    never = length - len(ever)
    each = length - max(map(len, sets))
    allowed = _padding(stream)
    is_split = "distributed" in loader.sampler.lower()
    fixed = len(sets) > 1 and all(one == sets[0] for one in sets)
    if each > allowed and is_split:
        missing, when, trained = each, "in an epoch", sets[0]
    elif (never > allowed and (fixed or is_regular(_order(stream, stream.first)))) or (
        never > 0 and fixed and (_covers_by_rank(stream) or _is_shuffled(stream))
    ):
        missing, when, trained = never, "in any epoch that was planned", ever
    else:
        return
    of_one = stream_of_one(view, stream)
    plan = of_one.plan(of_one.first) if of_one is not None else None
    of_one_process = {at for batch in plan or () for at in batch}
    by_one = of_one_process >= set(range(length)) - trained
    is_remainder = missing <= allowed and not by_one  # left out so that all ranks have as many
    split = [loader.split_line] if _covers_by_rank(stream) else []
    example = next((at for at in range(length) if at not in trained), 0)
    yield Finding(
        MISTAKES["samples-never-trained"],
        [*split, loader.sampler_return_line, *stream.lines],
        f"{missing} of {length} samples are not trained {when}, on any rank; the first is sample "
        f"{example}."
        + " One process trains them." * by_one
        + " They are always the same ones. Is this wanted?" * is_remainder,
        values={"missing": missing, "samples": length},
        nature=Nature.QUESTION if is_remainder else None,
    )


def _is_shuffled(stream: Stream) -> bool:
    """Return whether the epochs have different random orders."""
    orders = [_order(stream, one.ranks[min(one.ranks)]) for one in stream.passes]
    are_random = all(order and not is_regular(order) for order in orders)
    return are_random and any(order != orders[0] for order in orders)


def _covers_by_rank(stream: Stream) -> bool:
    """Return whether each rank has a part of the dataset of its own."""
    parts = [tuple(one.subset or ()) for one in stream.loaders.values()]
    return len(parts) > 1 and len(set(parts)) == len(parts)


def _chooses(stream: Stream) -> bool:
    """Return whether the sampler leaves out or repeats samples on purpose, by its name."""
    return any(word in stream.first.loader.sampler.lower() for word in CHOOSING)


def _order(stream: Stream, made: RankPass) -> list[Sample]:
    """Return the samples of a pass in order: the planned ones, else those that were read.

    Samples of a stream are known by their contents, if these differ.
    """
    if made.loader.is_iterable:
        read = stream.read(0, made)
        return read if len(set(read)) >= max(DISTINCT * len(read), LEAST_SAMPLES) else []
    if made.facts.planned is not None:
        return [at for batch in made.facts.planned for at in batch]
    if any(batch.indices is None for batch in made.batches):
        return []
    return [at for batch in made.batches for at in batch.indices or []]
