"""Rules for late batches: the loader restarts, computes, or waits for files."""

from typing import Any

from ....plurals import counted
from ..descriptions import INPUT, CauseKind, Indicator
from ..evidence import LATENCY_BOUND_BYTES, MIN_SHARE, Evidence, NamedCause
from ..line_profile import Doing
from .exchange import switched_off
from .lines import loader_lines, mostly_in
from .ranks import noisy, restricted_binding

MIN_LINE_SHARE = 0.3  # of the time in which batches are made, for its line to be named
WAITING = 0.5  # cores that a loader uses at most while it waits for files
MIN_STARTING_SHARE = 0.5  # of the input time, spent in starting loaders
MIN_KERNEL_SHARE = 0.5  # of the loader's CPU time, spent in the kernel or in opening files
MIN_STORAGE_SHARE = 0.1  # of the bytes read, from storage: then the loader may wait for storage
MIN_FILE_SHARE = 0.3  # of the time in which batches are made, in lines that open or read files
MIN_WAIT_SHARE = 0.3  # of that time, in which lines wait on no core: more than all they do else
MIN_WAITING = 0.5  # threads of a loader that wait for a core on average, and per busy core
MIN_THREADS_PER_WORKER = 2  # busy ones: then the threads are too many, and not the workers
MIN_BYTES_PER_BATCH = 64 << 10  # with less, the loader is not considered to read files


def inputs(e: Evidence) -> NamedCause:
    name, sentence, evidence = _inputs(e)
    lines = loader_lines(e) if name != "loader-start" else []
    if not lines:
        return name, sentence, evidence
    most = float(str(lines[0]["share"]))
    where = mostly_in(lines) if most >= MIN_LINE_SHARE else ""
    return name, sentence + where, evidence | {"loader_lines": lines}


def _inputs(e: Evidence) -> NamedCause:
    losses = e.losses_of_kind("input", doing=("input",))
    evidence: dict[str, Any] = {"most_on": sorted({x.rank for x in losses if x.rank is not None})}
    starting, whole = (
        e.mean_usage("everything", "starting"),
        e.loss_share("input", doing=("input",)),
    )
    if whole and starting >= MIN_STARTING_SHARE * whole:
        return _loader_start(e, evidence | {"starting": starting})
    if e.loader is None or not e.loader["seconds"]:
        sentence = "ranks wait for their next batch, and the loader could not be measured alone"
        return "input", sentence, evidence
    seconds, batches = e.loader["seconds"], e.loader["batches"]
    busy, workers = e.loader["busy_s"] / seconds, e.loader["workers"] / e.loader["ranks"]
    evidence |= {"cores_busy_a_rank": busy, "workers_a_rank": workers, **e.loader}
    each = f"{1e3 * seconds / batches:.3g} ms per batch"
    who = (
        f"{counted(workers, 'worker')} per rank"
        if workers
        else "no workers: the training process loads the batches"
    )
    activities = _activities(e)
    reading = activities.get(Doing.FILE, 0.0) if activities else None
    evidence |= {"file_share": reading} if reading is not None else {}
    reads = _reads_files(e.loader) and (busy < WAITING or _opens_or_reads(e.loader))
    if reading is None or reading < MIN_FILE_SHARE:
        if (named := _without_cores(e, each, who, evidence)) is not None:
            return named
        reads = reads and reading is None
    waits = _mostly_waits(activities)
    if reads and not waits:
        return _file_access(e.loader, each, who, evidence)
    if busy >= WAITING and not waits:
        sentence = f"the loader takes {each} and is limited by computation ({who})"
        # Both the kernel time and the time in Python's open() are less than MIN_KERNEL_SHARE of
        # the CPU time.
        if _opens_small_files(e.loader):
            files = counted(round(e.loader["opened"] / batches), "small file")
            sentence += f"; it opens {files} per batch"
        return "input-preprocessing", sentence, evidence
    return "input-waiting", f"the loader takes {each} and mostly waits ({who})", evidence


def _activities(e: Evidence) -> dict[Doing, float]:
    """Return what the lines that make batches do, as shares of their time; empty if unknown."""
    profile = e.line_profile
    if profile is None or e.loader is None:
        return {}
    if e.loader["workers"]:
        times = [(stack, doing, share) for (stack, doing), share in profile.workers.items()]
    else:
        own = [(one, share) for one, share in profile.times.items() if one.state == "input"]
        times = [(one.stack, one.doing, share) for one, share in own]
    sums: dict[Doing, float] = {}
    for stack, doing, share in times:
        # Outside of the script's lines, a loader waits for the training.
        idle = doing == Doing.WAIT and not profile.stacks[stack].lines
        if doing != Doing.COLLECTIVE and not idle:
            sums[doing] = sums.get(doing, 0.0) + share
    whole = sum(sums.values())
    return {doing: share / whole for doing, share in sums.items()} if whole else {}


def _mostly_waits(activities: dict[Doing, float]) -> bool:
    """Return whether lines sleep, or wait for a lock, more than they do anything else."""
    waits = activities.get(Doing.WAIT, 0.0)
    return waits >= MIN_WAIT_SHARE and waits == max(activities.values())


def _without_cores(e: Evidence, each: str, who: str, evidence: dict[str, Any]) -> NamedCause | None:
    """Return the cause if the loader's threads are ready to run and have no core."""
    assert e.loader is not None
    seconds, ranks = e.loader["seconds"], e.loader["ranks"]
    waiting, busy = e.loader.get("waited_s", 0.0) / seconds, e.loader["busy_s"] / seconds
    if waiting < MIN_WAITING * max(busy, 1.0):
        return None
    evidence = evidence | {"threads_waiting": waiting}
    takes = f"the loader takes {each} ({who}), and on average {waiting:.1f} of its threads per rank"
    by_others = noisy(e) if e.cpu_wait_share >= MIN_SHARE else None
    if (named := by_others or restricted_binding(e)) is not None:
        name, why, more = named
        return name, f"{takes} wait for a core: {why}", evidence | more
    threads, workers = e.loader.get("busy_threads", 0) / ranks, e.loader["workers"] / ranks
    if threads < MIN_THREADS_PER_WORKER * max(workers, 1):
        return None
    evidence |= {"loader_threads": threads, "cores": e.cores, "ranks_on_a_host": e.per_host}
    of = f"on each of {e.per_host} ranks " if e.per_host > 1 else ""
    share = f"{counted(threads, 'busy thread')} {of}share {counted(e.cores or 1, 'core')}"
    return "too-many-threads", f"{takes} wait for a core: {share}", evidence


def _reads_files(loader: dict[str, float]) -> bool:
    """Return whether the loader opens small files or reads many bytes.

    If the loader mostly waits, reads that the page cache serves do not count.
    """
    if _opens_small_files(loader):
        return True
    read = loader.get("read", 0)
    if loader["busy_s"] < WAITING * loader["seconds"] and "stored" in loader:
        read = read if loader["stored"] >= MIN_STORAGE_SHARE * read else 0
    return read >= MIN_BYTES_PER_BATCH * loader["batches"]


def _opens_small_files(loader: dict[str, float]) -> bool:
    opened = loader.get("opened", 0)
    return opened >= loader["batches"] and loader.get("read", 0) < LATENCY_BOUND_BYTES * opened


def _opens_or_reads(loader: dict[str, float]) -> bool:
    """Return whether the loader's CPU time is mostly in the kernel or in opening files."""
    opening = loader.get("opened", 0) * loader.get("open_s", 0) / loader["ranks"]
    return max(loader.get("system_s", 0), opening) >= MIN_KERNEL_SHARE * loader["busy_s"]


def _loader_start(e: Evidence, evidence: dict[str, Any]) -> NamedCause:
    used = e.used("everything")
    starts = sum(usage.get("starts", 0) for usage in used)
    each = sum(usage.get("starting", 0.0) for usage in used) / max(starts, 1)
    sentence = (
        f"the loader takes {1e3 * each:.3g} ms to start in each epoch (persistent_workers=True "
        "lets its workers continue)"
    )
    return "loader-start", sentence, evidence | {"seconds_a_start": each, "starts": starts}


def _file_access(
    loader: dict[str, float], each: str, who: str, evidence: dict[str, Any]
) -> NamedCause:
    opened, read = loader.get("opened", 0), loader.get("read", 0)
    rate = read / loader["seconds"]
    if _opens_small_files(loader):
        sentence = (
            f"the loader opens {counted(round(opened / loader['batches']), 'file')} per batch, of "
            f"{read / opened / 1e3:.3g} kB each and {opened / loader['seconds']:,.0f} per second, "
            f"and takes {each} ({who})"
        )
        return "input-small-files", sentence, evidence
    sentence = f"the loader reads {rate / 1e6:.3g} MB/s and takes {each} ({who})"
    return "input-bandwidth", sentence, evidence


# Descriptions

CAUSES = (
    CauseKind(
        "loader-start",
        INPUT,
        "the start of the loader in each epoch",
        "at least half of the input time is the start of the loader for the next epoch",
        states=("input",),
    ),
    CauseKind(
        "input-small-files",
        INPUT,
        "reading small files",
        "the loader, measured alone, waits or computes in the kernel, opens one or more files "
        "below 256 KiB per batch, and spends 30 % of the time of its batches in lines that open or"
        " read files, as sampled",
        states=("input",),
    ),
    CauseKind(
        "input-bandwidth",
        INPUT,
        "reading files from storage",
        "the same as `input-small-files`, with larger files from storage",
        states=("input",),
    ),
    CauseKind(
        "input-preprocessing",
        INPUT,
        "preprocessing of samples",
        "the loader is limited by computation",
        states=("input",),
    ),
    CauseKind(
        "input-waiting",
        INPUT,
        "waiting for the loader",
        "the loader mostly waits, but not for files: its lines sleep, or wait for a lock, a "
        "network or a database",
        states=("input",),
    ),
    CauseKind(
        "input",
        INPUT,
        "waiting for the next batch",
        "the loader could not be measured alone",
        states=("input",),
    ),
)

INDICATORS = (
    Indicator(
        "input",
        "input",
        "Throughput of all ranks with communication: with batches in memory, minus with the "
        "loader.",
        inputs,
        lambda e: e.loss_share("input", doing=("input",)),
        lambda e: switched_off(e, "cached", "input"),
    ),
)
