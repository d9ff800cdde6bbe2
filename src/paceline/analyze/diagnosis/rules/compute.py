"""What makes computing itself slow, on one rank alone as on many: precision, layout, memory, and
other threads of Python."""

from ..evidence import SMALL, Evidence, Said

DOUBLE = 0.5  # of the parameters' bytes


def wide(e: Evidence) -> float:
    """What float64 takes longer than float32, by a product of matrices in both."""
    sizes, took = e.said.get("parameters", {}), e.said.get("product_s", {})
    if sizes.get("float64", 0) <= DOUBLE * sum(sizes.values()) or len(took) < 2:
        return 0.0
    own = [rank["useful"] for rank in e.report.states]
    useful = sum(own) / len(own) if own else 0.0
    return float(useful * max(1 - took["float32"] / took["float64"], 0.0))


def precision(e: Evidence) -> Said:
    took = e.said["product_s"]
    factor = took["float64"] / took["float32"]
    sentence = (
        f"parameters are float64, in which a product of matrices takes {factor:.2g} times as "
        "long here as in float32"
    )
    return "precision", sentence, {"product_s": took, "bytes": e.said["parameters"]}


def layout(e: Evidence) -> Said:
    sentence = (
        "convolutions have their images channel by channel: as channels-last they are faster here"
    )
    return "layout", sentence, {"convolutions": e.said.get("convolutions")}


def touching(e: Evidence) -> float:
    """What first touches of memory take: it goes back to the system, and is asked for again."""
    took = e.said.get("fault_s", 0.0)
    share = min(e.used("silent", "faults") * took, e.used("silent", "system"))
    return float(share / max(e.threads or 1, 1) * e.of_step("silent"))


def allocator(e: Evidence) -> Said:
    faults = e.used("silent", "faults")
    sentence = (
        f"memory is given back and asked for again: {faults:,.0f} pages a second and rank are "
        f"touched for the first time, at {1e6 * e.said['fault_s']:.2g} µs each (another "
        "allocator keeps it)"
    )
    return "allocator", sentence, {"faults_per_s": faults, "fault_s": e.said.get("fault_s", 0.0)}


def memory(e: Evidence) -> Said:
    share = e.used("everything", "squeezed")
    sentence = "processes wait for memory: the host, or the control group, is at its limit"
    return "memory-limit", sentence, {"waiting": share}


def held(e: Evidence) -> float:
    """What another thread of Python computes while the one that trains does not, and has no
    loader, no exchange and no lack of a core to wait for."""
    off = 1 - e.used("silent", "thread") - e.used("silent", "delayed")
    return min(max(off, 0.0), _others(e)) * e.of_step("silent")


def _others(e: Evidence) -> float:
    found = [
        one.get("others", {}).get("seconds", 0.0) / one["seconds"]
        for climbed in e.climbs.get("silent", [])
        for one in climbed.used
        if one.get("seconds")
    ]
    return sum(found) / len(found) if found else 0.0


def interpreter(e: Evidence) -> Said:
    told = [one.get("others", {}) for c in e.climbs.get("silent", []) for one in c.used]
    most = max(told, key=lambda one: one.get("seconds", 0.0))
    where = f" ({most['file'].rpartition('/')[2]}:{most['line']})" if "file" in most else ""
    sentence = (
        f"thread {most.get('name', '?')!r}{where} computes in Python, and the training waits for "
        "the interpreter's lock"
    )
    return "interpreter", sentence, most | {"cores": _others(e)}


def searching(e: Evidence) -> float:
    """What DDP's search for unused parameters takes, where all are used, its exchange among it."""
    return (e.used("everything", "searching") if _in_vain(e) else 0.0) + mapped(e) * e.share(
        "transfer", doing=("transfer", "wait")
    )


def mapped(e: Evidence) -> float:
    """The share of the exchange that is the map of used parameters, which ranks exchange where DDP
    searches: one call a step, where calls are all latency."""
    calls = [one for group in e.report.groups for one in group.collectives]
    count, size = sum(one.count for one in calls), sum(one.bytes for one in calls)
    if not _in_vain(e) or not count or size >= SMALL * count:
        return 0.0
    return min(e.steps / count, 1.0)


def _in_vain(e: Evidence) -> bool:
    ddp = e.said.get("ddp", {})
    return bool(ddp.get("searches")) and not ddp.get("unused_bytes")


def search(e: Evidence) -> Said:
    sentence = (
        "DDP searches for unused parameters after each forward, exchanges a map of them, and finds "
        "none (find_unused_parameters=False)"
    )
    evidence = {"searching": e.used("everything", "searching"), "of_exchange": mapped(e)}
    return "unused-parameter-search", sentence, evidence | {"ddp": e.said["ddp"]}
