"""Rules for slow computation on one or many ranks: precision, layout, memory, Python threads."""

from collections.abc import Callable, Mapping
from typing import Any

from ....plurals import counted
from ....record.experiments.rung import (
    CHANNELS_LAST,
    NO_COLLECTION,
    SINGLE_PRECISION,
    THREADS_PAUSED,
)
from ..descriptions import (
    COMPUTING,
    CauseKind,
    Experiment,
    FirstRun,
    Indicator,
    largest_share,
    saved,
)
from ..evidence import LATENCY_BOUND_BYTES, Evidence, NamedCause
from ..rungs import Facts, Interval, reference_name

MIN_FLOAT64_SHARE = 0.5  # of the parameters' bytes


def _float64_cost(facts: Mapping[str, Any]) -> float:
    """Return the share of a matrix product that float64 costs over float32, as measured in both.

    0 if most parameters are not float64.
    """
    sizes, took = facts.get("parameters", {}), facts.get("product_s", {})
    if sizes.get("float64", 0) <= MIN_FLOAT64_SHARE * sum(sizes.values()):
        return 0.0
    if not took.get("float64") or "float32" not in took:
        return 0.0
    return float(max(1 - took["float32"] / took["float64"], 0.0))


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


def _mean_share(e: Evidence, rung: str, what: str) -> float:
    """Return the share of time in which ranks do something in a rung; mean of the ranks."""
    used = e.used(rung)
    shares = [usage.get(what, {}).get("seconds", 0.0) / usage["seconds"] for usage in used]
    return sum(shares) / len(shares) if shares else 0.0


def collecting_share(e: Evidence) -> float:
    """Return the share of time in which ranks collect garbage; mean of the ranks."""
    return _mean_share(e, "everything", "collecting")


def collector(e: Evidence) -> NamedCause:
    each = [usage.get("collecting", {}) for usage in e.used("everything")]
    most: dict[str, Any] = max(each, key=lambda one: one.get("seconds", 0.0), default={})
    count = most.get("count", 0) / e.steps
    where = f", mostly in {_place(most)}" if "file" in most else ""
    sentence = (
        f"Python's garbage collector runs {counted(count, 'time')} per step{where}, and "
        "nothing else of the rank runs meanwhile"
    )
    return "garbage-collection", sentence, most | {"collections_a_step": count}


def place_of(line: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the file of a line without its folders, and its number."""
    return str(line.get("file", "")).rpartition("/")[2], line.get("line", "?")


def _place(line: Mapping[str, Any]) -> str:
    return ":".join(map(str, place_of(line)))


def interpreter_lock_share(e: Evidence) -> float:
    """Return the share of time in which the training thread waits for the interpreter lock.

    Another Python thread computes then, and the training thread does not, although it does not
    wait for a loader, communication or a core.
    """
    off = 1 - e.mean_usage("silent", "thread") - e.mean_usage("silent", "delayed")
    return min(max(off, 0.0), _other_threads_cores(e)) * e.relative_step_time("silent")


def _other_threads_cores(e: Evidence) -> float:
    return _mean_share(e, "silent", "others")


def interpreter(e: Evidence) -> NamedCause:
    other_threads = [usage.get("others", {}) for usage in e.used("silent")]
    busiest = max(other_threads, key=lambda one: one.get("seconds", 0.0))
    where = f" ({_place(busiest)})" if "file" in busiest else ""
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
        e.mean_usage("everything", "searching") if _searches_in_vain(e.first_facts) else 0.0
    ) + used_map_share(e) * e.loss_share("transfer", doing=("transfer", "wait"))


def used_map_share(e: Evidence) -> float:
    """Return the share of the exchange that is DDP's map of used parameters.

    Ranks exchange the map once per step if DDP searches. It is relevant only if the collectives
    are latency-bound.
    """
    calls = [collective for group in e.report.groups for collective in group.collectives]
    count, size = sum(call.count for call in calls), sum(call.bytes for call in calls)
    if not _searches_in_vain(e.first_facts) or not count or size >= LATENCY_BOUND_BYTES * count:
        return 0.0
    return min(e.steps / count, 1.0)


def _searches_in_vain(facts: Mapping[str, Any]) -> bool:
    """Return whether DDP searches for unused parameters although all are used."""
    ddp = facts.get("ddp", {})
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


# Descriptions


def _expected_layout(first: FirstRun) -> float:
    """Return 1.0 if there are convolutions in the contiguous format: the share is not known yet."""
    each = (
        facts_of_rank.get("convolutions") and not facts_of_rank.get("channels_last")
        for facts_of_rank in first.facts
    )
    return float(any(each))


def _expected_page_faults(first: FirstRun) -> float:
    shares = [
        min(one["faults"] * facts.get("fault_s", 0.0), one["system"])
        / one["seconds"]
        / max(facts.get("threads", 1), 1)
        for facts, one in zip(first.facts, first.used, strict=True)
        if one.get("seconds") and "faults" in one and "system" in one
    ]
    return max(shares, default=0.0)


def _faults_of(rung: str, without: str) -> Callable[[Evidence], float]:
    """Return a function for the part of page faults that one rung has and another has not.

    The part of the faults is taken as a part of what keeping memory saves.
    """

    def overlap(e: Evidence) -> float:
        steps = {name: e.relative_step_time(name) for name in (rung, without, "everything")}
        faults = {name: e.mean_usage(name, "faults") * steps[name] for name in steps}
        if not faults["everything"] or not steps[without]:
            return 0.0
        part = (faults[rung] - faults[without]) / faults["everything"]
        return max(part, 0.0) * saved(KEPT_MEMORY, e)

    return overlap


def _collected_between_phases(e: Evidence) -> float:
    """Return the share of work between the phases of a step in lines that collect garbage."""
    at = {
        place_of(usage["collecting"])
        for usage in e.used("everything")
        if "file" in usage.get("collecting", {})
    }
    found = sum(
        loss.share * float(str(line.get("share", 0.0)))
        for loss in e.losses_of_kind("other", doing=("other",))
        for line in loss.lines
        if place_of(line) in at
    )
    return min(found, collecting_share(e))


def _collected_unevenly(e: Evidence) -> float:
    """Return how much longer one rank collects garbage than another, as a share of a step."""
    each: dict[int, list[float]] = {}
    for result in e.rungs.get("everything", []):
        for rank, one in enumerate(result.used):
            if one.get("seconds"):
                seconds = one.get("collecting", {}).get("seconds", 0.0)
                each.setdefault(rank, []).append(seconds / one["seconds"])
    means = [sum(shares) / len(shares) for shares in each.values()]
    return max(means) - min(means) if means else 0.0


def _why_not_paused(facts: Facts, used: Facts) -> str:
    if any(usage.get("gave_up") for usage in used):
        return "the training waits for another Python thread, which cannot be paused"
    if not any(usage.get("paused") for usage in used):
        return "the other Python threads run no code of the script, and cannot be paused"
    return ""


def _without_slow_threads(e: Evidence, found: Interval, whole: Interval | None) -> Interval:
    """Return the saving without what threads that can be paused cost: they are slower."""
    if whole is not None and 0 < whole.mean < found.mean:
        return found.scaled(whole.mean / found.mean)
    return found


def _map_of_used_parameters(e: Evidence) -> float:
    found = e.waterfall.of_step("exchange")
    return used_map_share(e) * max(found.mean, 0.0) if found is not None else 0.0


KEPT_MEMORY = Experiment(
    "memory kept",
    "everything",
    "all ranks, freed memory kept",
    expected=_expected_page_faults,
    settings={"keep-memory": True},
    is_separate=True,
)

CAUSES = (
    CauseKind(
        "layout",
        COMPUTING,
        "the memory layout of convolutions",
        "convolutions are faster in the channels-last memory format, as measured",
    ),
    CauseKind(
        "precision",
        COMPUTING,
        "computing in float64",
        "parameters are float64, and steps are shorter if the script computes in float32; or "
        "operators compute in float64 although most parameters do not (inside the model: the share "
        "is half of their time)",
    ),
    CauseKind(
        "allocator",
        COMPUTING,
        "page faults of the memory allocator",
        "the allocator causes page faults, and steps are shorter if freed memory is kept",
        is_in_useful=True,
    ),
    CauseKind(
        "memory-limit",
        COMPUTING,
        "lack of memory",
        "the kernel reports that processes wait for memory (`/proc/pressure/memory`)",
        is_in_useful=True,
    ),
    CauseKind(
        "garbage-collection",
        COMPUTING,
        "Python's garbage collector",
        "steps are shorter without Python's garbage collector; with the line that calls "
        "`gc.collect`, or in which most automatic collections occur",
    ),
    CauseKind(
        "interpreter",
        COMPUTING,
        "another Python thread",
        "steps are shorter while the other Python threads of the script are paused: the training "
        "waits for the interpreter lock (GIL)",
        is_in_useful=True,
    ),
    CauseKind(
        "unused-parameter-search",
        COMPUTING,
        "the search for unused parameters",
        "DDP searches for unused parameters, all are used, and steps are shorter without the "
        "search",
    ),
)

INDICATORS = (
    Indicator(
        "layout",
        "memory layout",
        "Time of a step of one rank with its batch in memory, minus that of a step whose "
        "convolutions have weights and images in the channels-last layout.",
        layout,
        experiment=Experiment(
            "alone, channels-last",
            "alone",
            "one rank, batches in memory, images as channels-last",
            CHANNELS_LAST,
            _expected_layout,
            "interleaved with it: images as they are",
            is_alone=True,
            # of the step of all ranks, and not of one
            adapt=lambda e, found, whole: found.scaled(e.relative_step_time("alone")),
        ),
    ),
    Indicator(
        "precision",
        "precision",
        "Time of a step, minus that of a step of the same script in float32. The record: useful "
        "share, times the additional time of a matrix product in float64 compared with float32 on "
        "these cores.",
        precision,
        lambda e: e.useful_share * _float64_cost(e.first_facts),
        experiment=Experiment(
            "float32 instead of float64",
            "everything",
            "all ranks, float32 instead of float64",
            SINGLE_PRECISION,
            lambda first: _float64_cost(first.facts[0]),
            is_separate=True,
            why_void=lambda facts, used: (
                "the parameters remain float64"
                * bool(facts[0].get("parameters", {}).get("float64"))
            ),
        ),
        is_estimate=True,
    ),
    Indicator(
        "allocator",
        "page faults",
        "Time of a step, minus that of a step in which freed memory is kept. The record: number of"
        " memory pages that were touched for the first time, times the time of one such page "
        "fault; the time inside the kernel if that is less.",
        allocator,
        page_fault_share,
        experiment=KEPT_MEMORY,
        is_estimate=True,
        overlaps={
            "exchange": _faults_of("cached", "silent"),
            "input": _faults_of("everything", "cached"),
        },
    ),
    Indicator(
        "memory",
        "lack of memory",
        "Time in which a process of the node waited for memory, as the kernel reports it.",
        memory,
        lambda e: e.mean_usage("everything", "squeezed"),
    ),
    Indicator(
        "collector",
        "garbage collection",
        "Time of steps with Python's garbage collector, minus that of steps without it, "
        "interleaved. The record: time inside collections.",
        collector,
        collecting_share,
        experiment=Experiment(
            NO_COLLECTION,
            reference_name(NO_COLLECTION),
            "all ranks, no garbage collection",
            NO_COLLECTION,
            lambda first: largest_share(first.used, "collecting"),
            "interleaved with it: garbage collection",
        ),
        overlaps={"script": _collected_between_phases, "uneven": _collected_unevenly},
    ),
    Indicator(
        "interpreter",
        "interpreter lock",
        "Time of steps with the script's other Python threads, minus that of steps in which they "
        "are paused, interleaved. The record: time in which they computed while the training "
        "thread neither computed nor waited for a core.",
        interpreter,
        interpreter_lock_share,
        experiment=Experiment(
            THREADS_PAUSED,
            "everything",
            "all ranks, other Python threads paused",
            THREADS_PAUSED,
            lambda first: largest_share(first.used, "others"),
            "interleaved with it: other Python threads running",
            is_separate=True,
            why_void=_why_not_paused,
            adapt=_without_slow_threads,
        ),
        is_estimate=True,
    ),
    Indicator(
        "search",
        "search for unused parameters",
        "Time of a step, minus that of a step without the search. The record: search of DDP for "
        "unused parameters after each forward, and the all-reduce of its map of used parameters, "
        "if all parameters are used.",
        search,
        unused_search_share,
        experiment=Experiment(
            "no search for unused parameters",
            "everything",
            "all ranks, no search for unused parameters",
            # 1.0: the share is not known yet
            expected=lambda first: float(any(map(_searches_in_vain, first.facts))),
            settings={"unused-search-off": True},
            is_separate=True,
        ),
        overlaps={"exchange": _map_of_used_parameters},
    ),
)
