"""Samples that occur several times, where only their contents are known."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from ..mistakes import MISTAKES, Finding
from ..passes import Sample, Stream
from ..view import View, unique

DISTINCT = 0.5  # of the samples of a batch that must differ before contents identify them
LEAST_SAMPLES = 4  # compared, before ranks are said to have the same
UNIQUE = 0.98  # of the samples of a rank: then equal ones on several ranks are no coincidence
AGAIN = 0.25  # of the batches, that occur again
NEARLY_ALL = 0.9
SHARED = 0.1  # of the samples of two ranks


def by_contents(view: View, stream: Stream) -> Iterator[Finding]:
    """Find samples that occur again in the same pass."""
    found = list(_repeated_batches(stream)) or list(_shared_samples(view, stream))
    yield from found[:1]


def _shared_samples(view: View, stream: Stream) -> Iterator[Finding]:
    """Find single samples that several ranks train, whose batches are not equal."""
    first = stream.passes[0]
    read: dict[int, list[Sample]] = {}
    for rank, made in first.ranks.items():
        batches = [stream.samples(rank, one, made.loader) or [] for one in made.batches]
        read[rank] = [sample for one in batches for sample in one]
        if len(set(read[rank])) < max(UNIQUE * len(read[rank]), LEAST_SAMPLES):
            return
    for one, two in combinations(sorted(read), 2):
        common = set(read[one]) & set(read[two])
        if len(common) < max(SHARED * min(len(read[one]), len(read[two])), LEAST_SAMPLES):
            continue
        together = _are_together(read[one], common) and _are_together(read[two], common)
        seeds = [*view.seed_lines("python", False), *view.seed_lines("numpy", False)]
        seeds += view.seed_lines("torch", False)
        kind = "samples-repeated" if together else "different-random-numbers"
        yield Finding(
            MISTAKES[kind],
            unique([*(seeds[:1] if not together else []), *stream.lines]),
            f"Ranks {one} and {two} trained {len(common)} equal samples among their first "
            f"{len(read[one])} and {len(read[two])} of an epoch: "
            + (
                "their parts overlap."
                if together
                else "each takes its part of another random order."
            ),
            ranks=[one, two],
            values={"samples": len(common), "of": len(read[one])},
            remedy="" if together else "shuffle with the same seed on all ranks before the split",
        )
        return


def _are_together(order: Sequence[Sample], common: set[Sample]) -> bool:
    """Return whether the common samples are one after the other."""
    positions = [at for at, sample in enumerate(order) if sample in common]
    return sum(after - before > 1 for before, after in pairwise(positions)) <= 1


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
            unique(stream.lines),
            f"{len(again)} of the first {total} batches have the samples of another batch: batch "
            f"{number + 1} of rank {rank} those of batch {before[1] + 1} of rank {before[0]}."
            f"{because}",
            values={"batches": total, "again": len(again)},
            remedy="give each worker a part of the stream (torch.utils.data.get_worker_info)"
            if workers > 1 and same_rank
            else "",
        )
        return
