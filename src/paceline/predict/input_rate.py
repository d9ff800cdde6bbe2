"""Predict the rate in samples/s at which a dataset can be read, and what would raise it.

The rate is the minimum of these terms:

    bandwidth     bytes/s / bytes per sample              of the storage, for all ranks
    operations    reads/s, one per sample                 of the storage, for all ranks
    processor     cores / CPU-seconds per sample          of the node
    interpreter   ranks * rate of one process             with any number of threads: they wait for
                                                          a lock, of Python or of a library
    threads       ranks * threads / (CPU-seconds + wait)  each thread processes one sample at a time

The first two terms and the wait apply only if the dataset is read from storage. The rate is then
lower than the minimum if two terms are nearly equal: see ``overlapped_rate``.
"""

import math
from dataclasses import dataclass, replace

# Share of the processor or thread limit below which the interpreter is the limit.
INTERPRETER_LIMIT_SHARE = 0.8
MIN_REMEDY_FACTOR = 1.1  # minimum factor by which a remedy raises the rate
MAX_THREADS = 16  # per rank


@dataclass(frozen=True)
class Terms:
    """Measured quantities of a dataset and a node.

    Attributes:
        samples: Number of samples.
        bytes: Stored bytes per sample.
        cores: Number of cores that the ranks may use.
        read_s: CPU-seconds per sample for reading, while all cores are busy.
        decode_s: CPU-seconds per sample for decoding, while all cores are busy.
        transform_s: CPU-seconds per sample for the transform, while all cores are busy.
        alone: Samples/s of one process on an otherwise idle node.
        bandwidth: Bytes/s from storage in large reads; None if the dataset is read from memory.
        operations: Samples/s from storage with many concurrent reads, one read per sample (of a
            store: per chunk); None if the dataset is read from memory.
        wait_s: Seconds that such a read takes without concurrent reads; None if the dataset is read
            from memory.
        stored_s: Additional CPU-seconds per sample of the first read compared with later ones.
        kind: "packed", "files" (one file per sample) or "store" (chunks, which each rank unpacks).
        chunk: Samples per chunk of a store; 1 for other kinds.
        decoded: Bytes of a decoded sample.
        blocks: Whether a packed dataset is read in blocks.
    """

    samples: int
    bytes: float
    cores: int
    read_s: float
    decode_s: float
    transform_s: float
    alone: float
    bandwidth: float | None = None
    operations: float | None = None
    wait_s: float | None = None
    stored_s: float = 0.0
    kind: str = "packed"
    chunk: int = 1
    decoded: float = 0.0
    blocks: bool = False

    @property
    def cpu_s(self) -> float:
        """CPU-seconds per sample, while all cores are busy."""
        return self.read_s + self.decode_s + self.transform_s

    @property
    def stored(self) -> bool:
        """Whether the dataset is read from storage, and not from memory."""
        return self.bandwidth is not None


@dataclass(frozen=True)
class Rate:
    """Predicted rate of all ranks together.

    Attributes:
        ranks: Number of ranks on the node.
        threads: Loader threads per rank.
        samples_s: Predicted samples/s.
        limit: Name of the limiting term.
        terms: Samples/s that each term allows, by name of the term.
    """

    ranks: int
    threads: int
    samples_s: float
    limit: str
    terms: dict[str, float]


def rate(t: Terms, ranks: int, threads: int, stored: bool) -> Rate:
    """Predict the rate of ``ranks`` ranks on one node with ``threads`` loader threads each.

    Args:
        stored: Whether samples come from storage, as in the first epoch, or from memory.
    """
    # The samples of a chunk go to different ranks, each of which decodes the whole chunk.
    decodings = min(ranks, t.chunk)
    cpu_s = t.cpu_s + (decodings - 1) * t.decode_s + (decodings * t.stored_s if stored else 0.0)
    wait_s = t.wait_s if stored and not t.blocks and t.wait_s is not None else 0.0
    found = {"processor": t.cores / cpu_s}
    if t.kind == "store":  # the library of the store reads for one thread at a time
        found["interpreter"] = ranks / (_seconds_per_sample(t, ranks, cpu_s) + wait_s)
    else:
        found["threads"] = ranks * threads / (cpu_s + wait_s)
        found["interpreter"] = ranks / _seconds_per_sample(t, ranks, cpu_s)
    if stored and t.bandwidth is not None and t.operations is not None:
        found["bandwidth"] = t.bandwidth / t.bytes
        if not t.blocks:
            found["operations"] = t.operations
    limit = min(found, key=found.__getitem__)
    least = found[limit]
    others = {name: found[name] for name in ("processor", "threads") if name in found}
    # The interpreter's rate never exceeds the processor's: it is the limit only if clearly lower.
    if limit == "interpreter" and least >= INTERPRETER_LIMIT_SHARE * min(others.values()):
        limit = min(others, key=others.__getitem__)
    if "operations" in found:
        jobs = ranks * (1 if t.kind == "store" else threads)
        of_ranks = min(ranks * threads / cpu_s, ranks / _seconds_per_sample(t, ranks, cpu_s))
        computing = min(found["processor"], of_ranks)
        reading = min(found["bandwidth"], found["operations"])
        if wait_s:
            reading = min(reading, jobs / wait_s)
        least = min(least, overlapped_rate(computing, reading, jobs))
    return Rate(ranks, threads, least, limit, found)


def overlapped_rate(computing: float, reading: float, jobs: int) -> float:
    """Return the samples/s of threads that each read a sample and then compute on it.

    Model: a closed network of two queues (Gordon and Newell 1967). With many threads the result
    approaches the lower rate. With n threads and equal rates, it is n / (n + 1) times the rate.

    Args:
        computing: Samples/s of computing alone.
        reading: Samples/s of reading alone.
        jobs: Number of threads.
    """
    low, high = sorted((computing, reading))
    ratio = low / high
    share = jobs / (jobs + 1) if ratio == 1 else (1 - ratio**jobs) / (1 - ratio ** (jobs + 1))
    return low * share


def _seconds_per_sample(t: Terms, ranks: int, cpu_s: float) -> float:
    """Return the seconds per sample of one process with its share of the cores.

    With more than one core, threads wait for a lock: ``Terms.alone`` is then a bound.

    Args:
        cpu_s: CPU-seconds per sample on this number of ranks.
    """
    cores = t.cores / ranks
    return max(cpu_s / cores, cpu_s / t.cpu_s / t.alone if cores > 1 else 0.0)


@dataclass(frozen=True)
class RateRemedy:
    """Change that raises the rate.

    Attributes:
        id: Identifier of the remedy.
        samples_s: Predicted samples/s with the remedy.
        sentence: Description for the user.
    """

    id: str
    samples_s: float
    sentence: str


def remedies(t: Terms, ranks: int, threads: int, stored: bool) -> list[RateRemedy]:
    """Return the remedies that raise the rate by MIN_REMEDY_FACTOR or more, the best first.

    The rate with each remedy is predicted without the other remedies.
    """
    now = rate(t, ranks, threads, stored)
    found = [*_threads(t, now, stored), *_less_work(t, now, stored)]
    if stored and t.stored:
        found += _storage(t, now)
    worth = [remedy for remedy in found if remedy.samples_s >= MIN_REMEDY_FACTOR * now.samples_s]
    return sorted(worth, key=lambda remedy: -remedy.samples_s)


def _rate_with(t: Terms, now: Rate, stored: bool) -> float:
    """Return the samples/s with terms ``t``, on the ranks and threads of ``now``."""
    return rate(t, now.ranks, now.threads, stored).samples_s


def _threads(t: Terms, now: Rate, stored: bool) -> list[RateRemedy]:
    if now.limit != "threads":
        return []
    others = min(value for name, value in now.terms.items() if name != "threads")
    per_thread = now.terms["threads"] / now.threads
    wanted = min(max(math.ceil(others / per_thread), now.threads + 1), MAX_THREADS)
    after = rate(t, now.ranks, wanted, stored).samples_s
    return [RateRemedy("threads", after, f"Loader(num_workers={wanted}) instead of {now.threads}")]


def _storage(t: Terms, now: Rate) -> list[RateRemedy]:
    found = []
    if t.kind != "packed":
        packed = replace(t, blocks=True, kind="packed")
        if t.kind == "store":  # packed as arrays, which need no decoding
            alone = t.alone * t.cpu_s / max(t.cpu_s - t.decode_s, 1e-9)
            packed = replace(packed, decode_s=0.0, alone=alone, chunk=1, bytes=t.decoded)
        sentence = "paceline pack, and shuffle='blocks': large reads instead of a sample at a time"
        found.append(RateRemedy("pack", _rate_with(packed, now, True), sentence))
    elif not t.blocks:
        sentence = "Loader(shuffle='blocks'): large reads instead of a sample at a time"
        found.append(RateRemedy("blocks", _rate_with(replace(t, blocks=True), now, True), sentence))
    if t.kind == "packed":
        sentence = (
            "paceline stage to the node's memory or a fast disk: the first epoch is then as fast "
            "as later ones"
        )
        found.append(RateRemedy("stage", _rate_with(t, now, False), sentence))
    return found


def _less_work(t: Terms, now: Rate, stored: bool) -> list[RateRemedy]:
    if now.limit not in ("processor", "interpreter", "threads"):
        return []
    if t.transform_s >= t.decode_s:
        without = _rate_with(_faster(t, t.transform_s), now, stored)
        sentence = (
            "what of the transform is always the same, once: paceline pack --apply (all of it here)"
        )
        return [RateRemedy("offline", without, sentence)]
    if t.decode_s > t.read_s and t.kind != "store":
        half = _rate_with(_faster(t, t.decode_s / 2), now, stored)
        sentence = (
            "decoding is most of the work: paceline pack --resize to half of it (a side shorter "
            "by 1.4), or --decode where there is room"
        )
        return [RateRemedy("smaller", half, sentence)]
    return []


def _faster(t: Terms, less_s: float) -> Terms:
    """Return the terms with ``less_s`` fewer CPU-seconds per sample, of transform or decoding."""
    scale = t.cpu_s / max(t.cpu_s - less_s, 1e-9)
    alone = t.alone * scale
    if t.transform_s >= less_s:
        return replace(t, transform_s=t.transform_s - less_s, alone=alone)
    return replace(t, decode_s=t.decode_s - less_s, alone=alone)


def nodes_until_storage_limit(t: Terms, ranks: int, threads: int) -> int | None:
    """Return the smallest number of equal nodes for which their shared storage is the limit.

    Return None if the storage was not measured, or is the limit with one node already.

    Args:
        ranks: Ranks on each node.
        threads: Loader threads per rank.
    """
    one_node = rate(t, ranks, threads, True).terms
    storage = [one_node[name] for name in ("bandwidth", "operations") if name in one_node]
    of_node = [value for name, value in one_node.items() if name not in ("bandwidth", "operations")]
    if not storage or min(storage) <= min(of_node):
        return None
    return math.ceil(min(storage) / min(of_node))


def striping(filesystem: str, shard_bytes: int) -> str | None:
    """Return advice for a parallel file system; None for others.

    The advice is from the documentation of the file system, and not measured.
    """
    if filesystem == "lustre":
        return (
            "on Lustre a shard lies on one server unless it is striped: lfs setstripe -c 4 -S 4M "
            f"FOLDER before packing (shards of {shard_bytes >> 20} MiB), and -c 1 for small files"
        )
    if filesystem == "gpfs":
        return (
            "GPFS reads whole blocks (mmlsfs shows their size): reading shards, or several blocks "
            "at once, is fast; reading single samples smaller than a block is slow"
        )
    return None
