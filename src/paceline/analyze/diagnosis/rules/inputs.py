"""Why the next batch is late: the loader starts anew, computes, or waits for files."""

from typing import Any

from ..evidence import SMALL, Evidence, Said

WAITING = 0.5  # of a loader's time its processes compute at most, if it waits for files
STARTING = 0.5  # of the input's share is spent in starting loaders
KERNEL = 0.5  # of what a loader computes is in the kernel or opens files, if it reads
STORED = 0.1  # of what is read comes from storage at least, if that is waited for
READS = 64 << 10  # bytes a batch: less is no reading to speak of


def inputs(e: Evidence) -> Said:
    losses = e.lost("input", doing=("input",))
    evidence: dict[str, Any] = {"most_on": sorted({x.rank for x in losses if x.rank is not None})}
    starting, whole = e.used("everything", "starting"), e.share("input", doing=("input",))
    if whole and starting >= STARTING * whole:
        return _starts(e, evidence | {"starting": starting})
    if e.loader is None or not e.loader["seconds"]:
        return "input", "the next batch was not there in time", evidence
    seconds, batches = e.loader["seconds"], e.loader["batches"]
    busy, workers = e.loader["busy_s"] / seconds, e.loader["workers"] / e.loader["ranks"]
    evidence |= {"cores_busy_a_rank": busy, "workers_a_rank": workers, **e.loader}
    each = f"{1e3 * seconds / batches:.3g} ms a batch"
    who = f"{workers:.3g} workers a rank" if workers else "no workers: the rank loads by itself"
    if _reads(e.loader) and (busy < WAITING or _opens_or_reads(e.loader)):
        return _files(e.loader, each, who, evidence)
    if busy >= WAITING:
        sentence = f"batches take the processor {each} to make ({who})"
        if _small(e.loader):  # less than half of it, as the system and Python's open() tell
            sentence += f", and {e.loader['opened'] / batches:.3g} small files are opened for each"
        return "input-preprocessing", sentence, evidence
    return "input-waiting", f"the loader waits, {each} ({who})", evidence


def _reads(loader: dict[str, float]) -> bool:
    """Whether it opens small files, or reads much; what it waits for is not the latter where all
    of it comes from memory."""
    if _small(loader):
        return True
    read = loader.get("read", 0)
    if loader["busy_s"] < WAITING * loader["seconds"] and "stored" in loader:
        read = read if loader["stored"] >= STORED * read else 0
    return read >= READS * loader["batches"]


def _small(loader: dict[str, float]) -> bool:
    opened = loader.get("opened", 0)
    return opened >= loader["batches"] and loader.get("read", 0) < SMALL * opened


def _opens_or_reads(loader: dict[str, float]) -> bool:
    """Whether that is most of what it computes: in the kernel, or in calls that open files."""
    opening = loader.get("opened", 0) * loader.get("open_s", 0) / loader["ranks"]
    return max(loader.get("system_s", 0), opening) >= KERNEL * loader["busy_s"]


def _starts(e: Evidence, evidence: dict[str, Any]) -> Said:
    found = [one.get("starts", 0) for c in e.climbs.get("everything", []) for one in c.used]
    seconds = [one.get("starting", 0.0) for c in e.climbs.get("everything", []) for one in c.used]
    each = sum(seconds) / max(sum(found), 1)
    sentence = (
        f"each epoch begins with {1e3 * each:.3g} ms of starting the loader (persistent_workers "
        "keeps its workers)"
    )
    return "loader-start", sentence, evidence | {"seconds_a_start": each, "starts": sum(found)}


def _files(loader: dict[str, float], each: str, who: str, evidence: dict[str, Any]) -> Said:
    opened, read = loader.get("opened", 0), loader.get("read", 0)
    rate = read / loader["seconds"]
    if _small(loader):
        sentence = (
            f"the loader opens {opened / loader['batches']:.3g} files a batch, of "
            f"{read / opened / 1e3:.3g} kB each: {opened / loader['seconds']:,.0f} a second, "
            f"{each} ({who})"
        )
        return "input-small-files", sentence, evidence
    sentence = f"the loader reads {rate / 1e6:,.0f} MB/s, {each} ({who})"
    return "input-bandwidth", sentence, evidence
