"""Rules for ranks that slow each other or differ: threads, cores, hosts, data, other programs."""

import math
import statistics

import numpy as np

from ....plurals import counted
from ....significance import range_by_chance, rank_spread
from ..descriptions import NODE, RANKS, SCRIPT, CauseKind, Experiment, Indicator, Rule, bar, saved
from ..evidence import MIN_SHARE, Evidence, NamedCause
from ..lateness import COMPUTING
from .lines import late_rank, sentence_of_rank, work_of_one_rank
from .script import script

NOISY = "noisy-machine"
BINDING = "binding"  # indicator of waits for the few cores that ranks may use
MIN_WAITED = 0.5  # waits over the mean work of the ranks: then only one rank works
MIN_FOREIGN_CORES = 0.2  # busy with other programs; less is due to the launcher and the kernel
MIN_HOST_SLOWDOWN = 1.15  # for the same matrix product
MIN_EXPLAINED = 0.5  # of a loss, for its cause to be named
MIN_BATCH_RATIO = 1.2  # batch size of one rank alone over its batch size with all ranks
MIN_R_SQUARED = 0.5  # of batch size and CPU time: above it, one explains the other


def sharing(e: Evidence) -> NamedCause | None:
    """Return the cause if all ranks together are slower than one rank alone.

    Threads that an experiment confirms come before other programs: ranks wait for cores in both
    cases, and the formula cannot tell for whose threads.
    """
    bar, fewer = e.waterfall.of_step("sharing"), e.step_time_saving("one thread", "silent")
    confirmed = fewer is not None and fewer.mean >= MIN_SHARE and fewer.sure
    if named := restricted_binding(e):
        return named
    if not confirmed and (named := noisy(e, bar.mean if bar is not None else 0.0)):
        return named
    evidence = {"threads": e.threads, "cores": e.cores, "ranks_on_a_host": e.per_host}
    crowded = e.threads and e.cores and e.threads * e.per_host > e.cores
    if crowded and (fewer is None or fewer.mean >= MIN_SHARE):
        return "too-many-threads", _thread_count_text(e), evidence
    alone, each = e.samples_per_step("alone"), e.samples_per_step("silent")
    if alone > MIN_BATCH_RATIO * each:
        sentence = (
            f"a step has {alone:.3g} samples on one rank alone, and {each:.3g} on each of several "
            "ranks: the cost of a step that does not depend on the batch size is divided among "
            "fewer samples"
        )
        return "fixed-cost", sentence, evidence | {"batch": each, "batch_alone": alone}
    sentence = (
        "the ranks of a node slow each other down: they share its memory bandwidth, caches and "
        "cores"
    )
    return "shared-machine", sentence, evidence


def threads(e: Evidence) -> NamedCause | None:
    """Return the cause if steps are shorter with one thread per rank."""
    if named := restricted_binding(e):
        return named
    evidence = {"threads": e.threads, "cores": e.cores, "ranks_on_a_host": e.per_host}
    return (
        "too-many-threads",
        _thread_count_text(e) + "; steps are shorter with one thread per rank",
        evidence,
    )


def _thread_count_text(e: Evidence) -> str:
    return (
        f"{counted(e.per_host, 'rank')} with {counted(e.threads or 1, 'thread')} each share "
        f"{counted(e.cores or 1, 'core')}"
    )


def restricted_binding(e: Evidence) -> NamedCause | None:
    """Return the cause if ranks may use fewer cores than they need, and the host has more."""
    has = e.first_facts.get("host_cores", 0)
    if not e.cores or not has or has <= e.cores:
        return None
    wanted = e.per_host * max(e.threads or 1, 1)
    if wanted <= e.cores:
        return None
    of = f"{e.cores} of the node's {counted(has, 'core')}"
    sentence = f"{counted(e.per_host, 'rank')} together may use only {of}"
    return "binding", sentence, {"cores": e.cores, "host_cores": has, "threads": e.threads}


def late_without_cores(e: Evidence) -> NamedCause | None:
    """Return the cause if communication waits for ranks that are bound to too few cores."""
    waits = min(e.cpu_wait_share * e.report.size, 1.0)  # all others wait for a late rank
    lost = e.loss_share("transfer") + e.occasional_waits
    return restricted_binding(e) if waits >= max(MIN_SHARE, MIN_EXPLAINED * lost) else None


def noisy(e: Evidence, lost: float = 0.0, ranks: int = 1) -> NamedCause | None:
    """Return the cause if other programs use the job's cores, and its ranks wait for these.

    Args:
        lost: Share of a step to explain, at least half of it by these waits.
        ranks: Number of ranks that wait for a rank without a core.
    """
    waits = min(e.foreign_wait_share * ranks, 1.0)
    if e.foreign_busy_cores < MIN_FOREIGN_CORES or waits < max(MIN_SHARE, MIN_EXPLAINED * lost):
        return None
    sentence = (
        f"other programs use {e.foreign_busy_cores:.1f} of the job's cores, and its ranks wait for "
        f"a core {100 * e.cpu_wait_share:.0f} % of the time"
    )
    return (NOISY, sentence, {"foreign_cores": e.foreign_busy_cores, "delayed": e.cpu_wait_share})


def foreign_delay_share(e: Evidence) -> float:
    """Return the smallest share of time that a rank waits for a core used by other programs.

    The ladder cannot measure it, because other programs slow all rungs and a single rank alike. A
    loss that only some ranks have is a separate bar.
    """
    return e.min_cpu_wait_share if e.foreign_busy_cores >= MIN_FOREIGN_CORES else 0.0


def uneven(e: Evidence) -> NamedCause | None:
    """Return the cause if the steps of one rank take longer."""
    late = e.losses_of_kind(doing=COMPUTING)
    if not late:
        return None
    loss = max(late, key=lambda loss: loss.share)
    rank, host = loss.rank, loss.host
    if rank is None:
        return None
    bar = e.waterfall.of_step("uneven")
    lost = bar.mean if bar is not None else e.compute_imbalance
    if named := data(e, lost):
        return named
    lines = work_of_one_rank(e, rank, is_only_there=True)
    if not lines and (
        named := _slow_host(e, str(host))
        or noisy(e, lost, e.report.size)
        or _synchronisation(e, loss.doing)
    ):
        return named
    when = e.describe_lateness(rank)
    if lines := lines or work_of_one_rank(e, rank):
        evidence = {"rank": rank, "host": host, "steps": loss.steps, "when": when, "lines": lines}
        return "slow-rank", sentence_of_rank(rank, lines, when), evidence
    sentence = (
        f"rank {rank} on {host} takes longer for its steps{f', {when}' if when else ''}, and all "
        "other ranks wait for it"
    )
    return "slow-rank", sentence, {"rank": rank, "host": host, "steps": loss.steps, "when": when}


def _synchronisation(e: Evidence, doing: str | None) -> NamedCause | None:
    """Return the cause if all ranks block for a value or an output, and one of them longer."""
    each = min((rank["other"] for rank in e.report.states), default=0.0)
    if doing != "other" or each < MIN_SHARE:
        return None
    named = script(e)
    return named if named is not None and named[0] == "synchronisation" else None


def _slow_host(e: Evidence, host: str) -> NamedCause | None:
    """Return the cause if the cores of a host are slower in the same matrix product."""
    took: dict[str, list[float]] = {}
    for name, facts in zip(e.report.hosts, e.facts, strict=False):
        if "float32" in facts.get("product_s", {}):
            took.setdefault(name, []).append(facts["product_s"]["float32"])
    if len(took) < 2 or host not in took:
        return None
    each = {name: statistics.median(times) for name, times in took.items()}
    others = statistics.median(time for name, time in each.items() if name != host)
    if each[host] < MIN_HOST_SLOWDOWN * others:
        return None
    sentence = (
        f"the cores of node {host} take {each[host] / others:.2g} times as long as those of the "
        "other nodes for the same matrix product, and all other nodes wait for it"
    )
    evidence = {
        "host": host,
        "product_s": each,
        "foreign_cores": e.foreign_busy_cores,
        "delayed": e.cpu_wait_share,
    }
    return "slow-host", sentence, evidence


def data(e: Evidence, constant: float = 0.0, varying: float = 0.0) -> NamedCause | None:
    """Return the cause if batches differ in size, and step times differ accordingly.

    Args:
        constant: Share of a step that one rank is slower all the time. Batches that all ranks draw
            alike explain only a difference by chance.
        varying: Share of a step that ranks wait for each other in turn.
    """
    elements_by_rank = [
        [result.used[rank].get("elements") for result in e.rungs.get("everything", [])]
        for rank in range(len(e.facts))
    ]
    known = [[batches for batches in rounds if batches] for rounds in elements_by_rank]
    if not known or not all(known):
        return None
    means = [statistics.fmean(batches["mean"] for batches in rounds) for rounds in known]
    spread = statistics.fmean(
        batches["spread"] / batches["mean"] for rounds in known for batches in rounds
    )
    correlation = statistics.fmean(batches["correlation"] for rounds in known for batches in rounds)
    apart = max(means) / min(means) - 1
    # Means of batches that all ranks draw alike differ by chance: by less than this.
    chance = range_by_chance(spread, e.steps, len(means))
    if apart >= MIN_SHARE and apart > chance and apart >= 0.5 * _step_time_spread(e):
        rank = means.index(max(means))
        sentence = (
            f"the batches of rank {rank} have {1 + apart:.2f} times as many elements as those of "
            "the rank with the fewest, and its steps take longer"
        )
        return "uneven-data", sentence, {"elements": means, "rank": rank}
    if spread >= MIN_SHARE and correlation >= math.sqrt(MIN_R_SQUARED):
        each = [batches["slope"] * batches["spread"] for rounds in known for batches in rounds]
        explained = statistics.fmean(each) / e.step_s if e.step_s else 0.0  # deviation of a step
        by_chance = range_by_chance(explained, e.steps, len(means))
        if by_chance < MIN_EXPLAINED * constant or explained < MIN_EXPLAINED * varying:
            return None
        sentence = (
            f"batches differ by {100 * spread:.0f} % in their number of elements, and step times "
            "differ accordingly: ranks wait for the rank with the largest batch"
        )
        return "uneven-data", sentence, {"spread": spread, "correlation": correlation}
    return None


def _step_time_spread(e: Evidence) -> float:
    """Return the slowest rank's step time minus the fastest's, relative to the mean of all.

    Measured without communication, in other rounds than those that choose the two ranks.
    """
    rounds = e.rungs.get("silent", [])
    if not rounds:
        return 0.0
    times = np.array([result.training_s for result in rounds]).T
    return max(rank_spread(times).longest_minus_shortest, 0.0) / float(times.mean())


def alternating(e: Evidence) -> NamedCause:
    """Return the cause if different ranks are late in different steps."""
    waits = e.occasional_waits
    if named := data(e, varying=waits) or noisy(e, waits, e.report.size):
        return named
    if (late := late_rank(e)) is not None and late.share >= MIN_EXPLAINED * waits:
        return late.named
    sentence = (
        "different ranks are late in different steps: their work varies, or other programs disturb "
        "them"
    )
    return "jitter", sentence, {"waits": e.occasional_waits, "delayed": e.cpu_wait_share}


def rule_for_phase(kind: str) -> Rule:
    """Return a rule for validation or checkpoints.

    The rule distinguishes one rank that works while the others wait from all ranks that work, one
    of them longer: with one of P ranks, waits are P - 1 times as long as the work.
    """

    def rule(e: Evidence) -> NamedCause | None:
        waits, own = e.losses_of_kind(doing=(kind,)), e.losses_of_kind(kind)
        waited, worked = (sum(loss.share for loss in losses) for losses in (waits, own))
        if waits and waited >= MIN_WAITED * worked:
            rank = max(waits, key=lambda loss: loss.share).rank
            work = {"validation": "evaluates", "checkpoint": "writes checkpoints"}[kind]
            sentence = f"only rank {rank} {work}, and all other ranks wait for it"
            return f"{kind}-on-one-rank", sentence, {"rank": rank}
        if not own:
            return None
        most = max(own, key=lambda loss: loss.share)
        work = {"validation": "evaluate", "checkpoint": "write checkpoints"}[kind]
        return kind, f"the training pauses while the ranks {work}", {"rank": most.rank}

    return rule


# Descriptions


def _waits_for_other_programs(e: Evidence) -> float:
    """Return what waits for cores that other programs use take, beyond those of one rank alone."""
    alone = e.mean_usage("alone", "delayed") * e.relative_step_time("alone")
    return max(e.foreign_wait_share - alone, 0.0)


ONE_THREAD = Experiment(
    "one thread", "silent", "all ranks, batches in memory, no communication, one thread per rank"
)

CAUSES = (
    CauseKind(
        "uneven-data",
        RANKS,
        "batches of different sizes",
        "batches differ in their number of elements, CPU time follows, and explains half of what "
        "is lost",
        is_of_one_rank=True,
    ),
    CauseKind(
        "slow-host",
        RANKS,
        "a slow node",
        "the cores of a node take longer for the same matrix product",
        is_of_one_rank=True,
    ),
    CauseKind(
        "slow-rank",
        RANKS,
        "a slow rank",
        "none of the other causes applies; with the rank, and since which step, always or at "
        "times. If the rank does work that others do not do: with its line, and if others wait for"
        " it during 5 % of their time",
        is_of_one_rank=True,
    ),
    CauseKind(
        "noisy-machine",
        RANKS,
        "other programs on the node",
        "other programs use more than a fifth of a core of the job, and waits for these cores "
        "explain half of what is lost; also if one rank alone becomes as slow as all ranks. Waits "
        "beyond what the other programs use are those of the job's own threads",
        is_in_useful=True,
    ),
    CauseKind(
        "jitter",
        RANKS,
        "ranks that are late in different steps",
        "different ranks are late in different steps, for none of these reasons",
        is_usual=True,
    ),
    CauseKind(
        "too-many-threads",
        NODE,
        "too many compute threads",
        "there are more threads than cores, and steps are shorter with one thread per rank",
        is_in_useful=True,
    ),
    CauseKind(
        "binding",
        NODE,
        "a binding to too few cores",
        "ranks may together use fewer cores than they need, and the node has more. If the "
        "experiments differ too much to confirm it, by the waits for a core in the record",
        is_in_useful=True,
    ),
    CauseKind(
        "fixed-cost",
        NODE,
        "the cost of a step that does not depend on the batch size",
        "one rank alone has a larger batch, because the global batch is divided among the ranks. "
        "The cause is the cost of a step that does not depend on the batch size",
    ),
    CauseKind(
        "shared-machine",
        NODE,
        "sharing of the node by its ranks",
        "none of the other causes applies, but a rank alone is faster: ranks share clock, memory "
        "bandwidth and caches",
        is_usual=True,
    ),
    CauseKind("validation", SCRIPT, "validation", "all ranks evaluate", states=("validation",)),
    CauseKind(
        "validation-on-one-rank",
        SCRIPT,
        "validation on one rank",
        "all ranks wait for the rank that evaluates, for at least half as long as a mean rank "
        "evaluates",
        states=("validation",),
        is_of_one_rank=True,
    ),
    CauseKind(
        "checkpoint", SCRIPT, "checkpoints", "all ranks write checkpoints", states=("checkpoint",)
    ),
    CauseKind(
        "checkpoint-on-one-rank",
        SCRIPT,
        "checkpoints of one rank",
        "all ranks wait for the rank that writes checkpoints",
        states=("checkpoint",),
        is_of_one_rank=True,
    ),
)

BARS = (
    Indicator(
        "sharing",
        "sharing the machine",
        "Throughput of the ideal, minus that of all ranks without communication, both at the rate "
        "of the fastest rank. Ranks share cores, caches and memory bandwidth.",
        sharing,
        ladder=bar("sharing"),
    ),
    Indicator(
        "uneven",
        "slower ranks",
        "Throughput of all ranks without communication at the rate of the fastest rank, minus that"
        " at the rate of the slowest rank.",
        uneven,
        lambda e: e.compute_imbalance,
        bar("uneven"),
    ),
)
PHASES = (
    Indicator(
        "validation",
        "validation",
        "Throughput of all ranks without communication, at the rate of the slowest rank: without "
        "validation, minus with validation. The ideal has no validation.",
        rule_for_phase("validation"),
        lambda e: e.loss_share("validation", doing=("validation",)),
        bar("validation"),
    ),
    Indicator(
        "checkpoint",
        "checkpoints",
        "Throughput of all ranks without communication, at the rate of the slowest rank: without "
        "checkpoints, minus with checkpoints. The ideal has no checkpoints.",
        rule_for_phase("checkpoint"),
        lambda e: e.loss_share("checkpoint", doing=("checkpoint",)),
        bar("checkpoint"),
    ),
)
CORES = (
    Indicator(
        BINDING,
        "waits for bound cores",
        "Time in which training threads wait for a core, if all ranks of a node are bound to fewer"
        " cores than they need. Only the record shows it.",
        restricted_binding,
        lambda e: e.cpu_wait_share if restricted_binding(e) is not None else 0.0,
    ),
    Indicator(
        "noise",
        "other programs",
        "Minimum time that each rank waits for a core while programs outside of the job use some "
        "of the cores.",
        noisy,
        foreign_delay_share,
        overlaps={"sharing": _waits_for_other_programs},
    ),
    Indicator(
        "threads",
        "threads",
        "Time of a step of all ranks without communication, minus that of a step with one thread "
        "per rank.",
        threads,
        experiment=ONE_THREAD,
        overlaps={"sharing": lambda e: saved(ONE_THREAD, e)},
    ),
)
