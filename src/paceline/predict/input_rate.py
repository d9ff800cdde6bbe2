"""How many samples a second a set can be read at: the least of what storage, its operations, the
processors and the loaders' threads allow; and what would raise that.

    bandwidth     bytes a second / bytes a sample        of the storage, for all ranks
    operations    reads a second, a sample's each        of the storage, for all ranks
    processor     cores / CPU-seconds a sample           of the host
    interpreter   ranks * what one process can make      whatever its threads are: they wait for a
                                                         lock, Python's or a library's
    threads       threads / (CPU-seconds + waiting)      one sample at a time each

The first two, and the waiting, are only there where the set does not come from memory. There the
rate is below the least of them as well, where two are near each other: see ``beside``.
"""

import math
from dataclasses import dataclass, replace

HINDERED = 0.8  # of what the processors allow is what one process makes, if its threads wait
WORTH = 1.1  # a remedy that gains less is none
MOST_THREADS = 16  # of a rank


@dataclass(frozen=True)
class Terms:
    """What was measured. bytes: a sample's, as it is stored. cores: that the ranks may use; *_s:
    CPU-seconds a sample, which a read of it, its decoding and its transform take while all cores
    are busy; alone: samples a second of one process that has the cores for itself.

    bandwidth: bytes a second from storage, in large pieces; operations: samples a second from
    there, each by itself (of a store: a chunk), many at once; wait_s: of one at a time; None where
    the set comes from memory anyway. stored_s: CPU-seconds a sample that its first reading takes
    more than later ones. kind: "packed", "files" (each sample is one) or "store", whose chunks of
    ``chunk`` samples each rank unpacks for itself; decoded: bytes of one that is unpacked; blocks:
    whether a packed set is read in blocks."""

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
        return self.read_s + self.decode_s + self.transform_s

    @property
    def stored(self) -> bool:
        """Whether there is a storage below the memory."""
        return self.bandwidth is not None


@dataclass(frozen=True)
class Rate:
    """samples_s: predicted, of all ranks together; limit: the term that it is."""

    ranks: int
    threads: int
    samples_s: float
    limit: str
    terms: dict[str, float]


def rate(t: Terms, ranks: int, threads: int, stored: bool) -> Rate:
    """Of so many ranks on one host, with so many loader threads each. stored: from storage, as in
    the first epoch; else from memory."""
    again = min(ranks, t.chunk)  # as its samples are for all ranks
    cpu_s = t.cpu_s + (again - 1) * t.decode_s + (again * t.stored_s if stored else 0.0)
    wait_s = t.wait_s if stored and not t.blocks and t.wait_s is not None else 0.0
    found = {"processor": t.cores / cpu_s}
    if t.kind == "store":  # its library reads for one thread at a time
        found["interpreter"] = ranks / (_longest(t, ranks, cpu_s) + wait_s)
    else:
        found["threads"] = ranks * threads / (cpu_s + wait_s)
        found["interpreter"] = ranks / _longest(t, ranks, cpu_s)
    if stored and t.bandwidth is not None and t.operations is not None:
        found["bandwidth"] = t.bandwidth / t.bytes
        if not t.blocks:
            found["operations"] = t.operations
    limit = min(found, key=found.__getitem__)
    least = found[limit]
    others = {name: found[name] for name in ("processor", "threads") if name in found}
    if limit == "interpreter" and least >= HINDERED * min(others.values()):
        limit = min(others, key=others.__getitem__)
    if "operations" in found:
        jobs = ranks * (1 if t.kind == "store" else threads)
        own = min(ranks * threads / cpu_s, ranks / _longest(t, ranks, cpu_s))
        computing = min(found["processor"], own)
        reading = min(found["bandwidth"], found["operations"])
        if wait_s:
            reading = min(reading, jobs / wait_s)
        least = min(least, beside(computing, reading, jobs))
    return Rate(ranks, threads, least, limit, found)


def beside(computing: float, reading: float, jobs: int) -> float:
    """Samples a second of ``jobs`` threads that each read a sample and then compute for it, where
    so many a second could be computed, and read: a closed network of two queues (Gordon and Newell
    1967). With many threads the less of the two; n / (n + 1) of it where both are the same."""
    low, high = sorted((computing, reading))
    ratio = low / high
    share = jobs / (jobs + 1) if ratio == 1 else (1 - ratio**jobs) / (1 - ratio ** (jobs + 1))
    return low * share


def _longest(t: Terms, ranks: int, cpu_s: float) -> float:
    """Seconds that one process takes a sample, with its share of the cores: with several its
    threads wait for each other."""
    share = t.cores / ranks
    return max(cpu_s / share, cpu_s / t.cpu_s / t.alone if share > 1 else 0.0)


@dataclass(frozen=True)
class Remedy:
    """samples_s: what the rate is predicted to be with it."""

    id: str
    samples_s: float
    sentence: str


def remedies(t: Terms, ranks: int, threads: int, stored: bool) -> list[Remedy]:
    """What raises the rate by a tenth or more, the best first: each by itself."""
    now = rate(t, ranks, threads, stored)
    found = [*_threads(t, now, stored), *_less_work(t, now, stored)]
    if stored and t.stored:
        found += _storage(t, now)
    worth = [one for one in found if one.samples_s >= WORTH * now.samples_s]
    return sorted(worth, key=lambda one: -one.samples_s)


def _threads(t: Terms, now: Rate, stored: bool) -> list[Remedy]:
    if now.limit != "threads":
        return []
    others = min(value for name, value in now.terms.items() if name != "threads")
    each = now.terms["threads"] / now.threads
    wanted = min(max(math.ceil(others / each), now.threads + 1), MOST_THREADS)
    after = rate(t, now.ranks, wanted, stored).samples_s
    return [Remedy("threads", after, f"Loader(num_workers={wanted}) instead of {now.threads}")]


def _storage(t: Terms, now: Rate) -> list[Remedy]:
    found = []
    if t.kind != "packed":
        packed = replace(t, blocks=True, kind="packed")
        if t.kind == "store":  # as arrays
            alone = t.alone * t.cpu_s / max(t.cpu_s - t.decode_s, 1e-9)
            packed = replace(packed, decode_s=0.0, alone=alone, chunk=1, bytes=t.decoded)
        said = "paceline pack, and shuffle='blocks': large reads instead of a sample at a time"
        found.append(Remedy("pack", rate(packed, now.ranks, now.threads, True).samples_s, said))
    elif not t.blocks:
        blocks = replace(t, blocks=True)
        said = "Loader(shuffle='blocks'): large reads instead of a sample at a time"
        found.append(Remedy("blocks", rate(blocks, now.ranks, now.threads, True).samples_s, said))
    near = rate(t, now.ranks, now.threads, False).samples_s
    said = "paceline stage to this host's memory or a fast disk; the first epoch is as the later"
    return [*found, Remedy("stage", near, said)] if t.kind == "packed" else found


def _less_work(t: Terms, now: Rate, stored: bool) -> list[Remedy]:
    if now.limit not in ("processor", "interpreter", "threads"):
        return []
    found = []
    if t.transform_s >= t.decode_s:
        without = _faster(t, t.transform_s)
        said = (
            "what of the transform is always the same, once: paceline pack --apply (all of it here)"
        )
        found.append(
            Remedy("offline", rate(without, now.ranks, now.threads, stored).samples_s, said)
        )
    elif t.decode_s > t.read_s and t.kind != "store":
        half = _faster(t, t.decode_s / 2)
        said = (
            "decoding is most of the work: paceline pack --resize to half of it (a side shorter "
            "by 1.4), or --decode where there is room"
        )
        found.append(Remedy("smaller", rate(half, now.ranks, now.threads, stored).samples_s, said))
    return found


def _faster(t: Terms, less_s: float) -> Terms:
    """With so much less of the processor a sample, of the transform or else of the decoding."""
    scale = t.cpu_s / max(t.cpu_s - less_s, 1e-9)
    alone = t.alone * scale
    if t.transform_s >= less_s:
        return replace(t, transform_s=t.transform_s - less_s, alone=alone)
    return replace(t, decode_s=t.decode_s - less_s, alone=alone)


def hosts(t: Terms, ranks: int, threads: int) -> int | None:
    """From how many such hosts on their storage is what limits, as it is one for all of them;
    None where it does not, or always has."""
    one = rate(t, ranks, threads, True)
    shared = [one.terms[name] for name in ("bandwidth", "operations") if name in one.terms]
    own = [value for name, value in one.terms.items() if name not in ("bandwidth", "operations")]
    if not shared or min(shared) <= min(own):
        return None
    return math.ceil(min(shared) / min(own))


def striping(filesystem: str, shard_bytes: int) -> str | None:
    """What to set on a parallel file system, from its documentation: not tried here."""
    if filesystem == "lustre":
        return (
            "on Lustre a shard lies on one server unless it is striped: lfs setstripe -c 4 -S 4M "
            f"FOLDER before packing (shards of {shard_bytes >> 20} MiB), and -c 1 for small files"
        )
    if filesystem == "gpfs":
        return (
            "GPFS reads whole blocks (mmlsfs shows their size): shards and blocks of several of "
            "them are fast, samples of less by themselves are not"
        )
    return None
