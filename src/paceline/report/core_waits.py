"""Sentence about threads that wait for a core: which there are, and how many cores they share."""

from ..analyze.figures.report import Report
from ..plurals import counted, parse_ranges
from .numbers import percent

MIN_STARVED = 0.02  # of a rank's time; less is not mentioned
MIN_WAITING = 0.5  # other threads of a rank that wait on average; fewer are not mentioned
MIN_BUSY = 0.5  # threads; fewer are not mentioned


def core_wait_sentence(report: Report) -> str:
    """Return which threads share how many cores on the node where ranks wait most for a core.

    Without full stop; empty if no rank waits for a core to speak of.
    """
    waits = [
        (rank["starved"], one.threads_waiting + one.worker_threads_waiting)
        for rank, one in zip(report.states, report.other_threads, strict=False)
    ]
    if not any(own >= MIN_STARVED or others >= MIN_WAITING for own, others in waits):
        return ""
    host = report.hosts[waits.index(max(waits, key=sum))]
    here = [i for i, name in enumerate(report.hosts) if name == host]
    starved = sum(waits[i][0] for i in here) / len(here)
    others = sum(waits[i][1] for i in here)
    said = f"{_threads_on(report, host, here)}: "
    thread, waits_for = ("thread", "waits") if len(here) == 1 else ("threads", "wait")
    said += f"the training {thread} {waits_for} for a core {percent(starved)} of the time"
    if others >= MIN_WAITING:
        number = counted(round(others, 1), "other thread")
        wait = "waits" if number.startswith("1 ") else "wait"
        said += f", and on average {number} {wait} for one"
    return said


def _threads_on(report: Report, host: str, here: list[int]) -> str:
    """Return the threads of a node's ranks, and the cores that they share."""
    places = [place for place in report.places if place.host == host]
    cores = {core for place in places for core in parse_ranges(place.cores or "")}
    threads = max((place.threads or 0 for place in places), default=0)
    each = " each" if len(here) > 1 else ""
    said = counted(len(here), "rank")
    said += f" with {counted(threads, 'thread')} of PyTorch{each}" if threads else ""
    workers = sum(report.other_threads[i].worker_threads for i in here)
    if workers >= MIN_BUSY:
        said += f" and {counted(round(workers, 1), 'busy thread')} of their child processes"
    where = f" on {host}" if len(set(report.hosts)) > 1 else ""
    does = "uses" if len(here) == 1 and workers < MIN_BUSY else "share"
    return f"{said} {does} {counted(len(cores), 'core')}{where}" if cores else f"{said}{where}"
