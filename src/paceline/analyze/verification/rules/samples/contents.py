"""Samples that occur several times or never, where only their contents are known."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

from .....record.training.facts.samples import BatchFacts
from ...mistakes import MISTAKES, Finding
from ...passes import Sample, Stream, streams
from ...view import View

DISTINCT = 0.5  # of the samples of a batch that must differ before contents identify them
LEAST_SAMPLES = 4  # compared, before ranks are said to have the same
UNIQUE = 0.98  # of the samples of a rank: then equal ones on several ranks are no coincidence
AGAIN = 0.25  # of the batches, that occur again
NEARLY_ALL = 0.9
MISSING = 0.1  # of the samples of a stream
LEAST_KEPT = 4  # batches that are trained again
LEAST_PERIOD = 3  # batches of an epoch, without which an order can't be told
SHARED = 0.1  # of the samples of two ranks


def same_order(view: View) -> Iterator[Finding]:
    """Find scripts without a loader that shuffle, and train batches in the same order again."""
    for stream in view.training:
        first, line = stream.first, stream.first.loader.sampler_seed_line
        if first.loader.dataset or not line:
            continue
        batches = [stream.samples(0, one, first.loader) for one in first.batches]
        read = [tuple(one or ()) for one in batches]
        period = next((at for at in range(1, len(read)) if read[at] == read[0]), 0)
        is_known = period >= LEAST_PERIOD and len(set(read[:period])) == period
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


def kept_batches(view: View) -> Iterator[Finding]:
    """Find scripts that keep the batches of a shuffled pass, and train these again."""
    loaders = [one for one in view.training if one.first.loader.dataset]
    again = [one for one in view.training if not one.first.loader.dataset]
    for stream in loaders:
        made = stream.first
        order = [at for batch in made.facts.planned or () for at in batch]
        if len(stream.passes) > 1 or not again or is_regular(order):
            continue
        rank = min(stream.passes[0].ranks)
        kept = {tuple(column) for batch in made.batches for column in batch.contents}
        later = again[0].passes[0].ranks.get(rank)
        trained = later.batches if later is not None else []
        equal = [one for one in trained if kept & {tuple(column) for column in one.contents}]
        if len(equal) < max(LEAST_KEPT, AGAIN * len(made.batches), NEARLY_ALL * len(trained)):
            continue
        yield Finding(
            MISTAKES["epoch-not-set"],
            [made.facts.line, *again[0].lines, made.loader.line],
            f"Rank {rank} reads one pass of {len(made.batches)} batches, and then trains the same "
            f"batches again, {len(equal)} in the steps that were observed: later epochs have the "
            "order and the augmentation of the first one. itertools.cycle and a list of a loader's "
            "batches do so.",
            values={"batches": len(made.batches), "again": len(equal)},
            remedy="iterate over the loader in each epoch, after set_epoch of its sampler",
        )


def without_loader(view: View) -> Iterator[Finding]:
    """Find samples that all ranks train, or none does, where a script has no loader."""
    for stream in view.training:
        made, line = stream.passes[0].ranks, stream.first.loader.sampler_seed_line
        epochs = [until_again(stream, rank, one.batches) for rank, one in made.items()]
        if stream.first.loader.dataset or len(stream.loaders) < view.size or not all(epochs):
            continue
        common = set.intersection(*map(set, epochs))
        if len(common) >= UNIQUE * max(map(len, epochs)):
            yield Finding(
                MISTAKES["same-samples"],
                [line, *stream.lines],
                f"Each of {view.size} ranks trains the same {len(common)} samples before it begins "
                "again, in another order: an epoch of all ranks trains each sample "
                f"{view.size} times.",
                values={"samples": len(common), "times": view.size},
                remedy="give each rank a part of one order that is the same on all ranks",
            )
        of_one = stream_of_one(view, stream)
        whole = set(until_again(of_one, 0, of_one.first.batches)) if of_one else set()
        ever = {one for rank, each in made.items() for one in stream.read(rank, each)}
        missing = len(whole - ever) * (len(ever & whole) >= UNIQUE * len(ever))
        largest = max(batch.samples for one in made.values() for batch in one.batches)
        if missing > view.size * largest:  # else a remainder
            yield Finding(
                MISTAKES["samples-never-trained"],
                [*stream.lines, line],
                f"One process trains {len(whole)} different samples in an epoch. {view.size} ranks "
                f"train {', '.join(str(len(each)) for each in epochs)} in one, and never "
                f"{missing} of them.",
                values={"missing": missing, "samples": len(whole)},
            )


def stream_of_one(view: View, stream: Stream) -> Stream | None:
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


def until_again(stream: Stream, rank: int, batches: Sequence[BatchFacts]) -> list[Sample]:
    """Return the samples of the first batches until one occurs again; [] if none does.

    Empty also if there are fewer batches than an epoch has at least.
    """
    seen: dict[Sample, None] = {}
    for number, batch in enumerate(batches):
        samples = stream.samples(rank, batch, stream.loaders[rank]) or []
        if any(one in seen for one in samples):
            return list(seen) if number >= LEAST_PERIOD else []
        seen.update(dict.fromkeys(samples))
    return []


def by_contents(view: View, stream: Stream) -> Iterator[Finding]:
    """Find samples that occur again in the same pass."""
    found = list(_repeated_batches(stream)) or list(_shared_samples(view, stream))
    yield from (found or list(_other_total(view, stream)))[:1]


def _shared_samples(view: View, stream: Stream) -> Iterator[Finding]:
    """Find single samples that several ranks train, whose batches are not equal."""
    first = stream.passes[0]
    read: dict[int, list[Sample]] = {}
    for rank, made in first.ranks.items():
        read[rank] = stream.read(rank, made)
        if len(set(read[rank])) < max(UNIQUE * len(read[rank]), LEAST_SAMPLES):
            return
    for one, two in combinations(sorted(read), 2):
        common = set(read[one]) & set(read[two])
        if len(common) < max(SHARED * min(len(read[one]), len(read[two])), LEAST_SAMPLES):
            continue
        yield Finding(
            MISTAKES["samples-repeated"],
            [*stream.lines, *view.seed_lines_of_ranks()[:1]],
            f"Ranks {one} and {two} trained {len(common)} equal samples among their first "
            f"{len(read[one])} and {len(read[two])} of an epoch: their parts overlap.",
            ranks=[one, two],
            values={"samples": len(common), "of": len(read[one])},
            remedy="divide one order that is the same on all ranks",
        )


def _other_total(view: View, stream: Stream) -> Iterator[Finding]:
    """Find streams of which all ranks together read less than one process does."""
    of_one, ranks = stream_of_one(view, stream), stream.passes[0].ranks
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
                samples = stream.samples(rank, batch, made.loader)
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
        share = AGAIN if has_loader else NEARLY_ALL * (1 - 1 / stream.size)
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


def is_regular(order: Sequence[Any]) -> bool:
    """Return whether an order is not random: it goes up, but for a return to the start."""
    if len(order) < LEAST_SAMPLES:
        return True
    falls = sum(bool(after <= before) for before, after in pairwise(order))
    return falls <= max(1, len(order) // 20)
