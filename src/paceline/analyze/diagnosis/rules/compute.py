"""Rules for slow computation on one or many ranks: precision, layout, memory, Python threads."""

from typing import Any

from ....plurals import counted
from ..evidence import LATENCY_BOUND_BYTES, Evidence, NamedCause

MIN_FLOAT64_SHARE = 0.5  # of the parameters' bytes


def float64_share(e: Evidence) -> float:
    """Return the share of time that float64 costs over float32.

    It is estimated from a matrix product that was measured in both dtypes.
    """
    sizes, took = e.first_facts.get("parameters", {}), e.first_facts.get("product_s", {})
    if sizes.get("float64", 0) <= MIN_FLOAT64_SHARE * sum(sizes.values()) or len(took) < 2:
        return 0.0
    own = [rank["useful"] for rank in e.report.states]
    useful = sum(own) / len(own) if own else 0.0
    return float(useful * max(1 - took["float32"] / took["float64"], 0.0))


def precision(e: Evidence) -> NamedCause:
    took = e.first_facts["product_s"]
    factor = took["float64"] / took["float32"]
    sentence = (
        f"parameters are float64, and a matrix product takes {factor:.2g} times as long in float64 "
        "as in float32 on this machine"
    )
    return "precision", sentence, {"product_s": took, "bytes": e.first_facts["parameters"]}


def layout(e: Evidence) -> NamedCause:
    sentence = (
        "convolutions get their images in the contiguous memory format (NCHW), and are faster with "
        "channels-last on this machine"
    )
    return "layout", sentence, {"convolutions": e.first_facts.get("convolutions")}


def page_fault_share(e: Evidence) -> float:
    """Return the share of time spent in page faults.

    They occur when memory is freed to the system, allocated again and touched for the first time.
    """
    took = e.first_facts.get("fault_s", 0.0)
    share = min(e.mean_usage("silent", "faults") * took, e.mean_usage("silent", "system"))
    return float(share / max(e.threads or 1, 1) * e.relative_step_time("silent"))


def allocator(e: Evidence) -> NamedCause:
    faults = e.mean_usage("silent", "faults")
    sentence = (
        "the allocator returns memory to the system and requests it again: each rank has "
        f"{faults:,.0f} page faults per second of {1e6 * e.first_facts['fault_s']:.2g} µs each "
        "(another allocator keeps the memory)"
    )
    return (
        "allocator",
        sentence,
        {"faults_per_s": faults, "fault_s": e.first_facts.get("fault_s", 0.0)},
    )


def memory(e: Evidence) -> NamedCause:
    share = e.mean_usage("everything", "squeezed")
    sentence = "processes wait for memory: the node or its control group is at its memory limit"
    return "memory-limit", sentence, {"waiting": share}


def collecting_share(e: Evidence) -> float:
    """Return the share of time in which ranks collect garbage; mean of the ranks."""
    found = [
        one.get("collecting", {}).get("seconds", 0.0) / one["seconds"]
        for climbed in e.rungs.get("everything", [])
        for one in climbed.used
        if one.get("seconds")
    ]
    return sum(found) / len(found) if found else 0.0


def collector(e: Evidence) -> NamedCause:
    each = [one.get("collecting", {}) for c in e.rungs.get("everything", []) for one in c.used]
    most: dict[str, Any] = max(each, key=lambda one: one.get("seconds", 0.0), default={})
    count = most.get("count", 0) / e.steps
    where = f", mostly in {place(most)}" if "file" in most else ""
    sentence = (
        f"Python's garbage collector runs {counted(count, 'time')} per step{where}, and "
        "nothing else of the rank runs meanwhile"
    )
    return "garbage-collection", sentence, most | {"collections_a_step": count}


def place(found: dict[str, Any]) -> str:
    """Return the file without its folders, and the line."""
    return f"{found['file'].rpartition('/')[2]}:{found.get('line', '?')}"


def interpreter_lock_share(e: Evidence) -> float:
    """Return the share of time in which the training thread waits for the interpreter lock.

    Another Python thread computes then, and the training thread does not, although it does not
    wait for a loader, communication or a core.
    """
    off = 1 - e.mean_usage("silent", "thread") - e.mean_usage("silent", "delayed")
    return min(max(off, 0.0), _other_threads_cores(e)) * e.relative_step_time("silent")


def _other_threads_cores(e: Evidence) -> float:
    found = [
        one.get("others", {}).get("seconds", 0.0) / one["seconds"]
        for climbed in e.rungs.get("silent", [])
        for one in climbed.used
        if one.get("seconds")
    ]
    return sum(found) / len(found) if found else 0.0


def interpreter(e: Evidence) -> NamedCause:
    other_threads = [one.get("others", {}) for c in e.rungs.get("silent", []) for one in c.used]
    busiest = max(other_threads, key=lambda one: one.get("seconds", 0.0))
    where = f" ({place(busiest)})" if "file" in busiest else ""
    sentence = (
        f"thread {busiest.get('name', '?')!r}{where} computes in Python, and the training waits "
        "for the interpreter lock (GIL)"
    )
    return "interpreter", sentence, busiest | {"cores": _other_threads_cores(e)}


def unused_search_share(e: Evidence) -> float:
    """Return the share of DDP's search for unused parameters, with its communication.

    0 if some parameters are unused, as the search is needed then.
    """
    return (
        e.mean_usage("everything", "searching") if _search_is_useless(e) else 0.0
    ) + used_map_share(e) * e.loss_share("transfer", doing=("transfer", "wait"))


def used_map_share(e: Evidence) -> float:
    """Return the share of the exchange that is DDP's map of used parameters.

    Ranks exchange the map once per step if DDP searches. It is relevant only if the collectives
    are latency-bound.
    """
    calls = [one for group in e.report.groups for one in group.collectives]
    count, size = sum(one.count for one in calls), sum(one.bytes for one in calls)
    if not _search_is_useless(e) or not count or size >= LATENCY_BOUND_BYTES * count:
        return 0.0
    return min(e.steps / count, 1.0)


def _search_is_useless(e: Evidence) -> bool:
    ddp = e.first_facts.get("ddp", {})
    return bool(ddp.get("searches")) and not ddp.get("unused_bytes")


def search(e: Evidence) -> NamedCause:
    sentence = (
        "DDP searches for unused parameters after each forward, exchanges the result, and finds "
        "none (find_unused_parameters=False avoids it)"
    )
    evidence = {
        "searching": e.mean_usage("everything", "searching"),
        "of_exchange": used_map_share(e),
    }
    return "unused-parameter-search", sentence, evidence | {"ddp": e.first_facts["ddp"]}
