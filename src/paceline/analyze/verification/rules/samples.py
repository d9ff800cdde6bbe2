"""Which samples are trained and evaluated: the same ones, some several times, some never."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ....observe.facts.samples import Phase
from ..joined_runs import JoinedRuns, ranks_text
from ..mistakes import Finding, Mistake, Nature, by_id, ids
from ..passes import DISTINCT, LEAST_SAMPLES, MIN_PERIOD, Sample, Stream, is_regular, streams

MIN_UNIQUE_SHARE = (
    0.98  # of the samples of a rank: then equal ones on several ranks are no coincidence
)
MIN_REPEATED_SHARE = 0.25  # of the batches, that occur again
NEARLY_ALL = 0.9
MISSING = 0.1  # of the samples of a stream
LEAST_KEPT = 4  # batches that are trained again
MIN_SHARED_SHARE = 0.1  # of the samples of two ranks
MOST_OF_BATCHES = 0.9  # of the batches or samples
OVERLAP = 0.02  # of the samples of an epoch
REDRAWN = 0.02  # of the samples that a sampler with replacement draws again on one rank
BY_BATCH = ("batch", "shard")  # samplers that give ranks whole batches (accelerate)
EXACT_SAMPLERS = ("sequentialsampler", "randomsampler")  # mean the whole dataset
GATHERS = ("allgather", "gather")

MISTAKES = by_id(
    Mistake(
        "same-samples",
        "Ranks train the same samples",
        "the samples of the ranks: positions in the dataset, else contents",
        "split the dataset: DistributedSampler, or world.shard(loader)",
        explains=ids(
            "samples-repeated samples-never-trained gradients-differ schedule-counts-other-steps"
        ),
    ),
    Mistake(
        "samples-repeated",
        "Samples are trained several times in an epoch",
        "how often an epoch of all ranks trains each sample",
        "use a sampler that returns each sample once",
    ),
    Mistake(
        "samples-never-trained",
        "Samples are never trained",
        "the samples that no rank trains, and one process does",
        "check the lengths, offsets and drop_last of the split",
    ),
    Mistake(
        "epoch-not-set",
        "All epochs have the same order",
        "the order of the samples in each epoch",
        "call sampler.set_epoch(epoch) at the start of each epoch",
    ),
    Mistake(
        "validation-repeats-samples",
        "Validation counts samples several times",
        "how often a validation of all ranks evaluates each sample",
        "leave out the samples that the sampler added, or validate on one rank",
        explains=("metric-differs",),
        is_late=True,
    ),
    Mistake(
        "validation-misses-samples",
        "Validation leaves out samples",
        "the samples that no rank evaluates",
        "use drop_last=False, and a split that covers all samples",
        explains=("metric-differs",),
        is_late=True,
    ),
)


def same_samples(joined: JoinedRuns) -> Iterator[Finding]:
    """Find ranks that train the same samples."""
    for stream in joined.training:
        if len(stream.loaders) < 2 or stream.divides_batches:
            continue
        if (found := _same_batches(stream, joined)) is not None:
            yield found


def repeated_or_missing(joined: JoinedRuns) -> Iterator[Finding]:
    """Find epochs in which samples occur several times, or not at all."""
    for stream in joined.training:
        if stream.divides_batches:
            continue
        if not (stream.shares_dataset or stream.has_root):
            yield from by_contents(joined, stream)
            continue
        plans = [plan for one in stream.passes if (plan := stream.plans(one))]
        if not plans:
            continue
        yield from _repeated(joined, stream, plans)
        yield from _missing(joined, stream, plans)


def epoch_not_set(joined: JoinedRuns) -> Iterator[Finding]:
    """Find a random order that is the same in all epochs."""
    for stream in joined.training:
        known = [order for one in stream.passes if (order := stream.order(one.first))]
        if len(known) < 2 or any(order != known[0] for order in known):
            continue
        loader = stream.first.loader
        is_shuffled_stream = loader.is_iterable and bool(loader.sampler_seed_line)
        may_differ = loader.sampler_has_epoch or is_shuffled_stream
        if not may_differ if loader.is_iterable else is_regular(known[0]):
            continue
        what = loader.dataset if loader.is_iterable else loader.sampler
        epochs = f"{len(known)} epochs" if len(known) > 2 else "both epochs"
        has_epoch = loader.sampler_has_epoch
        set_to = {one.first.facts.sampler_epoch for one in stream.passes}
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
            f"{ranks_text(sorted(stream.loaders), joined.size)} trained "
            f"{len(known[0])} samples each in the same random order in {epochs}: {reason}",
            values={"epochs": len(known), "samples": len(known[0])},
            # A stream has set_epoch also if it is read in order.
            nature=Nature.QUESTION if loader.is_iterable and not is_shuffled_stream else None,
            remedy="" if has_epoch else "make the order depend on the epoch",
        )


def _same_batches(stream: Stream, joined: JoinedRuns) -> Finding | None:
    """Return a finding if two ranks read the same batches at the same time."""
    groups = [
        pair
        for pair in combinations(sorted(stream.loaders), 2)
        if _share_of_equal_batches(stream, *pair) >= MOST_OF_BATCHES
    ]
    if not groups:
        return None
    ranks = sorted({rank for pair in groups for rank in pair})
    everything = len(groups) == joined.size * (joined.size - 1) // 2
    sharded = any(model.is_sharded for model in joined.ranks[0].models)
    loader = stream.loaders[ranks[0]]
    how = "" if everything else f" ({'; '.join(f'{a} and {b}' for a, b in groups[:4])})"
    samples = sum(batch.samples for batch in stream.passes[0].ranks[ranks[0]].batches)
    sampler = f" The sampler is {loader.sampler}." if loader.sampler else ""
    return Finding(
        MISTAKES["same-samples"],
        [loader.sampler_return_line, *stream.lines],
        f"{ranks_text(ranks, joined.size)} trained the same samples in the same order{how}, "
        f"{samples} of each in the first epoch as far as it was run: a step computes the gradient "
        f"of one rank's batch several times.{sampler}",
        ranks=ranks,
        values={"samples": samples, "pairs": len(groups)},
        nature=Nature.QUESTION if sharded and not everything else None,
    )


def _share_of_equal_batches(stream: Stream, one: int, two: int) -> float:
    equal = compared = seen = 0
    for joint in stream.passes:
        if one not in joint.ranks or two not in joint.ranks:
            continue
        a, b = joint.ranks[one], joint.ranks[two]
        for first, second in zip(a.batches, b.batches, strict=False):
            left = stream.samples(first, a.loader)
            right = stream.samples(second, b.loader)
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


def _repeated(
    joined: JoinedRuns, stream: Stream, plans: Sequence[dict[int, list[int]]]
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
    padding = stream.padding if is_padded_by_batch else stream.size - 1
    if extra <= padding and max(counts.values()) <= 2:
        return
    uniform = min(counts.values())
    total = sum(map(len, plan.values()))
    draws_again = sum(within.values()) >= max(REDRAWN * total, 1)
    if (draws_again or stream.chooses) and uniform < 2:
        return  # a sampler that draws samples again
    if across < OVERLAP * total and sum(within.values()) < OVERLAP * total:
        return
    where = "on several ranks" if across >= sum(within.values()) else "on one rank"
    most, times = counts.most_common(1)[0]
    is_whole = not sum(within.values()) and uniform == stream.size == times
    is_whole = is_whole and len(counts) >= MOST_OF_BATCHES * (loader.dataset_length or 0)
    lines = [loader.sampler_return_line, *stream.lines]
    if not is_whole and across and not any(map(is_regular, plan.values())):  # of other orders
        lines = [*joined.seed_lines_of_ranks()[:1], loader.sampler_seed_line, *lines]
    yield Finding(
        MISTAKES["same-samples" if is_whole else "samples-repeated"],
        lines,
        f"An epoch trains {len(counts)} different samples, and {extra} of {total} times a sample "
        f"that was trained before, {where}; sample {most} {times} times.",
        values={"different": len(counts), "repeated": extra, "trained": total},
    )


def _missing(
    joined: JoinedRuns, stream: Stream, plans: Sequence[dict[int, list[int]]]
) -> Iterator[Finding]:
    loader = stream.first.loader
    length = loader.root_length if stream.has_root else loader.dataset_length
    if length is None or stream.chooses or (stream.has_root and not stream.is_by_rank):
        return
    sets = [set().union(*map(set, plan.values())) for plan in plans]
    ever = set().union(*sets)
    within = sum(len(one) - len(set(one)) for one in plans[0].values())
    if within > OVERLAP * sum(map(len, plans[0].values())):
        return  # drawn with replacement
    never = length - len(ever)
    each = length - max(map(len, sets))
    allowed = stream.padding
    is_split = "distributed" in loader.sampler.lower()
    fixed = len(sets) > 1 and all(one == sets[0] for one in sets)
    if each > allowed and is_split:
        missing, when, trained = each, "in an epoch", sets[0]
    elif (never > allowed and (fixed or is_regular(stream.order(stream.first)))) or (
        never > 0 and fixed and (stream.is_by_rank or stream.is_shuffled)
    ):
        missing, when, trained = never, "in any epoch that was planned", ever
    else:
        return
    of_one = stream_of_one(joined, stream)
    plan = of_one.plan(of_one.first) if of_one is not None else None
    by_one = set(plan or ()) >= set(range(length)) - trained
    is_remainder = missing <= allowed and not by_one  # left out so that all ranks have as many
    split = [loader.split_line] if stream.is_by_rank else []
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


def same_order(joined: JoinedRuns) -> Iterator[Finding]:
    """Find scripts without a loader that shuffle, and train batches in the same order again."""
    for stream in joined.training:
        first, line = stream.first, stream.first.loader.sampler_seed_line
        if first.loader.dataset or not line:
            continue
        batches = [stream.samples(one, first.loader) for one in first.batches]
        read = [tuple(one or ()) for one in batches]
        period = next((at for at in range(1, len(read)) if read[at] == read[0]), 0)
        is_known = period >= MIN_PERIOD and len(set(read[:period])) == period
        if not is_known or len(read) < 2 * period or () in read:
            continue
        if any(after != before for before, after in zip(read, read[period:], strict=False)):
            continue
        yield Finding(
            MISTAKES["epoch-not-set"],
            [line, *stream.lines],
            f"Rank 0 trains the same {period} batches in the same order again, "
            f"{len(read) // period} times in the first {len(read)} batches, although the script "
            "shuffles in this loop.",
            values={"batches": period},
            remedy="seed the order with the epoch, or make its generator before the loop",
        )


def kept_batches(joined: JoinedRuns) -> Iterator[Finding]:
    """Find scripts that keep the batches of a shuffled pass, and train these again."""
    loaders = [one for one in joined.training if one.first.loader.dataset]
    again = [one for one in joined.training if not one.first.loader.dataset]
    for stream in loaders:
        first = stream.first
        if len(stream.passes) > 1 or not again or is_regular(first.planned or []):
            continue
        rank = min(stream.passes[0].ranks)
        kept = {tuple(column) for batch in first.batches for column in batch.contents}
        later = again[0].passes[0].ranks.get(rank)
        trained = later.batches if later is not None else []
        equal = [one for one in trained if kept & {tuple(column) for column in one.contents}]
        if len(equal) < max(
            LEAST_KEPT, MIN_REPEATED_SHARE * len(first.batches), NEARLY_ALL * len(trained)
        ):
            continue
        yield Finding(
            MISTAKES["epoch-not-set"],
            [first.facts.line, *again[0].lines, first.loader.line],
            f"Rank {rank} reads one pass of {len(first.batches)} batches, and then trains the same "
            f"batches again, {len(equal)} in the steps that were observed: later epochs have the "
            "order and the augmentation of the first one. itertools.cycle and a list of a loader's "
            "batches do so.",
            values={"batches": len(first.batches), "again": len(equal)},
            remedy="iterate over the loader in each epoch, after set_epoch of its sampler",
        )


def without_loader(joined: JoinedRuns) -> Iterator[Finding]:
    """Find samples that all ranks train, or none does, where a script has no loader."""
    for stream in joined.training:
        by_rank, line = stream.passes[0].ranks, stream.first.loader.sampler_seed_line
        epochs = [stream.until_again(rank, one.batches) for rank, one in by_rank.items()]
        if stream.first.loader.dataset or len(stream.loaders) < joined.size or not all(epochs):
            continue
        common = set.intersection(*map(set, epochs))
        if len(common) >= MIN_UNIQUE_SHARE * max(map(len, epochs)):
            yield Finding(
                MISTAKES["same-samples"],
                [line, *stream.lines],
                f"Each of {joined.size} ranks trains the same {len(common)} samples before it "
                "begins again, in another order: an epoch of all ranks trains each sample "
                f"{joined.size} times.",
                values={"samples": len(common), "times": joined.size},
                remedy="give each rank a part of one order that is the same on all ranks",
            )
        of_one = stream_of_one(joined, stream)
        whole = set(of_one.until_again(0, of_one.first.batches)) if of_one else set()
        ever = {one for each in by_rank.values() for one in stream.read(each)}
        missing = len(whole - ever) * (len(ever & whole) >= MIN_UNIQUE_SHARE * len(ever))
        largest = max(batch.samples for one in by_rank.values() for batch in one.batches)
        if missing > joined.size * largest:  # else a remainder
            yield Finding(
                MISTAKES["samples-never-trained"],
                [*stream.lines, line],
                f"One process trains {len(whole)} different samples in an epoch. {joined.size} "
                f"ranks train {', '.join(str(len(each)) for each in epochs)} in one, and never "
                f"{missing} of them.",
                values={"missing": missing, "samples": len(whole)},
            )


def stream_of_one(joined: JoinedRuns, stream: Stream) -> Stream | None:
    """Return the stream of the unchanged script on one rank."""
    alone, loader = joined.runs.alone, stream.first.loader
    found = streams([alone], stream.phase) if alone is not None else []
    return next(
        (
            one
            for one in found
            if (one.first.loader.line, one.first.loader.dataset) == (loader.line, loader.dataset)
        ),
        None,
    )


def by_contents(joined: JoinedRuns, stream: Stream) -> Iterator[Finding]:
    """Find samples that occur again in the same pass."""
    found = list(_repeated_batches(stream)) or list(_shared_samples(joined, stream))
    yield from (found or list(_other_total(joined, stream)))[:1]


def _shared_samples(joined: JoinedRuns, stream: Stream) -> Iterator[Finding]:
    """Find single samples that several ranks train, whose batches are not equal."""
    first = stream.passes[0]
    read: dict[int, list[Sample]] = {}
    for rank, made in first.ranks.items():
        read[rank] = stream.read(made)
        if len(set(read[rank])) < max(MIN_UNIQUE_SHARE * len(read[rank]), LEAST_SAMPLES):
            return
    for one, two in combinations(sorted(read), 2):
        common = set(read[one]) & set(read[two])
        if len(common) < max(MIN_SHARED_SHARE * min(len(read[one]), len(read[two])), LEAST_SAMPLES):
            continue
        yield Finding(
            MISTAKES["samples-repeated"],
            [*stream.lines, *joined.seed_lines_of_ranks()[:1]],
            f"Ranks {one} and {two} trained {len(common)} equal samples among their first "
            f"{len(read[one])} and {len(read[two])} of an epoch: their parts overlap.",
            ranks=[one, two],
            values={"samples": len(common), "of": len(read[one])},
            remedy="divide one order that is the same on all ranks",
        )


def _other_total(joined: JoinedRuns, stream: Stream) -> Iterator[Finding]:
    """Find streams of which all ranks together read less than one process does."""
    of_one, ranks = stream_of_one(joined, stream), stream.passes[0].ranks
    every = [*ranks.values(), *(one.first for one in [of_one] if one is not None)]
    if of_one is None or len(ranks) < stream.size or not all(x.facts.is_read for x in every):
        return
    *read, whole = [x.facts.skipped_samples + sum(b.samples for b in x.batches) for x in every]
    missing, loader = whole - sum(read), stream.first.loader
    if missing > max(stream.size * (loader.batch_size or 1), MISSING * whole):
        yield Finding(
            MISTAKES["samples-never-trained"],
            [loader.sampler_seed_line, *stream.lines],
            f"In the first epoch, {stream.size} ranks read {sum(read)} samples of the stream "
            f"({', '.join(map(str, read))}), and one process reads {whole}: {missing} samples are "
            "on no rank.",
            values={"missing": missing, "samples": whole},
            remedy="divide the stream once: by the number of ranks times the number of workers",
        )


def _repeated_batches(stream: Stream) -> Iterator[Finding]:
    """Find batches that occur again in the same pass, in streams whose samples have no index."""
    for one in stream.passes[:1]:
        seen: dict[tuple[Sample, ...], tuple[int, int]] = {}
        total, again = 0, []
        for rank, made in one.ranks.items():
            for batch in made.batches:
                samples = stream.samples(batch, made.loader)
                if not samples or len(set(samples)) < max(DISTINCT * len(samples), 1):
                    continue
                total += 1
                before = seen.setdefault(tuple(samples), (rank, batch.number))
                if not made.loader.dataset and before[0] == rank and before[1] < batch.number:
                    break  # inputs of a model, without a loader: the next epoch begins
                if before != (rank, batch.number):
                    again.append((rank, batch.number, before))
        # Inputs of a model, without a loader, contain the same points on purpose (a boundary).
        has_loader = bool(stream.first.loader.dataset)
        share = MIN_REPEATED_SHARE if has_loader else NEARLY_ALL * (1 - 1 / stream.size)
        if total < LEAST_SAMPLES or len(again) < 2 or len(again) < share * total:
            continue
        rank, number, before = again[0]
        workers = stream.first.loader.workers
        same_rank = before[0] == rank
        because = (
            f" Each of {workers} workers reads the whole stream."
            if workers > 1 and same_rank
            else " The ranks read overlapping parts of the stream."
            if not same_rank
            else ""
        )
        yield Finding(
            MISTAKES["samples-repeated" if same_rank else "same-samples"],
            stream.lines,
            f"{len(again)} of the first {total} batches have the samples of another batch: batch "
            f"{number + 1} of rank {rank} those of batch {before[1] + 1} of rank {before[0]}."
            f"{because}",
            values={"batches": total, "again": len(again)},
            remedy="give each worker a part of the stream (torch.utils.data.get_worker_info)"
            if workers > 1 and same_rank
            else "",
        )


def coverage(joined: JoinedRuns) -> Iterator[Finding]:
    """Find validation passes that count samples several times, or leave some out.

    Those that have to be evaluated are known by their positions in a dataset, else by the contents
    of those that one process evaluates.
    """
    for stream in joined.evaluation:
        sampler = stream.first.loader.sampler.lower()
        plans = _by_position(stream)
        if plans is not None:
            length = stream.first.loader.dataset_length or 0
            whole = _root_length(joined, stream) if stream.has_root else length
            if sampler in EXACT_SAMPLERS or "distributed" in sampler:
                yield from _judged(joined, stream, plans, whole)
        elif stream.first.loader.is_iterable:
            yield from _judged(joined, stream, *_evaluated_by_one(joined, stream))


def _by_position(stream: Stream) -> dict[int, list[int]] | None:
    """Return the positions of the samples by rank; None if they are not known."""
    if not (stream.shares_dataset or stream.has_root or len(stream.loaders) == 1):
        return None
    plans = {rank: plan for rank, plan in stream.plans(stream.passes[0]).items() if plan}
    return plans if plans and stream.first.loader.dataset_length else None


def _evaluated_by_one(joined: JoinedRuns, stream: Stream) -> tuple[dict[int, list[Sample]], int]:
    """Return the samples by rank, and how many one process evaluates; {} and 0 if unknown."""
    of_one, first = stream_of_one(joined, stream), stream.passes[0].ranks
    if of_one is None or not all(one.is_whole for one in (*first.values(), of_one.first)):
        return {}, 0
    expected = of_one.read(of_one.first)
    read = {rank: stream.read(one) for rank, one in first.items()}
    whole, union = set(expected), {one for each in read.values() for one in each}
    is_known = len(whole) >= max(MIN_UNIQUE_SHARE * len(expected), LEAST_SAMPLES)
    is_same = len(union & whole) >= MIN_UNIQUE_SHARE * len(union)
    return (read, len(whole)) if is_known and is_same else ({}, 0)


def _root_length(joined: JoinedRuns, stream: Stream) -> int:
    """Return the number of samples that parts of one dataset have to cover.

    That is the whole dataset if each rank has a part of its own, and little is left out that is
    not trained.
    """
    loaders = stream.loaders.values()
    covered = {at for one in loaders for at in one.subset or ()}
    trained = {
        at
        for other in joined.training
        if other.first.loader.root_checksum == stream.first.loader.root_checksum
        for one in other.loaders.values()
        for at in one.subset or ()
    }
    whole = (stream.first.loader.root_length or 0) - len(trained - covered)
    batch = stream.first.loader.batch_size or 1
    is_whole = stream.is_by_rank and whole - len(covered) < stream.size * batch
    return whole if is_whole else len(covered)


def _judged(
    joined: JoinedRuns, stream: Stream, read: Mapping[int, Sequence[Sample]], length: int
) -> Iterator[Finding]:
    if not read:
        return
    loader, who = stream.first.loader, ranks_text(sorted(read), joined.size)
    sets = [set(one) for one in read.values()]
    union = set().union(*sets)
    times = len(sets) if all(one == union for one in sets) else 1  # each rank validates the same
    repeated = sum(map(len, read.values())) - times * len(union)
    evaluations = [one for one in joined.ranks[0].collectives if one.phase is Phase.EVALUATION]
    is_mended = any(one.removes_repeated for one in evaluations)
    if repeated and "random" not in loader.sampler.lower() and not is_mended:
        gathers = any(one.kind.startswith(GATHERS) for one in evaluations)
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
        parts = {tuple(one.subset or ()) for one in stream.loaders.values()}
        yield Finding(
            MISTAKES["validation-misses-samples"],
            [loader.split_line if len(parts) > 1 else "", *stream.lines],
            f"{who} leave{'s' * (len(read) == 1)} out {missing} of {length} samples in a validation"
            + (" pass: drop_last is set." if loader.drops_last else " pass."),
            values={"samples": length, "missing": missing},
        )
