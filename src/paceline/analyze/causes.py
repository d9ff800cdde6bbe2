"""What holds a training back, by rules over the figures of ladder and record: a table that can be
read and extended. A rule says from what its cause does, and how much of a step it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .groups import Group
from .ladder import Interval, Waterfall
from .losses import Loss
from .report import Report

WORTH = 0.05  # of a step: what takes less is not worth a word
SMALL = 256 << 10  # bytes: below, an exchange is its latency
WAITING = 0.5  # of a loader's time its processes compute at most, if it waits for files
HIDDEN = 0.1  # of the exchange is covered by computing at most, if nothing overlaps


@dataclass(frozen=True)
class Cause:
    """share: of a step's time, as measured; interval: between what the two witnesses allow."""

    id: str
    share: float
    interval: tuple[float, float]
    sentence: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What rules look at. loader: of all ranks' loaders alone (batches, seconds, busy_s, workers,
    ranks), None where no loader was seen. cores: of a host, threads: of a rank; steps: measured."""

    waterfall: Waterfall
    report: Report
    loader: dict[str, float] | None
    threads: int | None
    cores: int | None
    per_host: int
    steps: int

    def lost(self, *kinds: str, doing: tuple[str, ...] = ()) -> list[Loss]:
        """Losses of these kinds, and waits for ranks that did one of ``doing`` longer."""
        return [
            loss
            for loss in self.report.losses
            if loss.kind in kinds or (loss.kind == "wait" and loss.doing in doing)
        ]


@dataclass(frozen=True)
class Witness:
    """One cause as the ladder and the record saw it; None: this one can't."""

    name: str
    ladder: Interval | None
    record: float | None

    @property
    def differ(self) -> bool:
        """By more than the interval, and by more than is worth a word."""
        if self.ladder is None or self.record is None:
            return False
        return not (self.ladder.low - WORTH <= self.record <= self.ladder.high + WORTH)


def witnesses(e: Evidence) -> list[Witness]:
    """Shares of a step's time, from experiment and from observation."""
    of_step = e.waterfall.of_step

    def share(*kinds: str, doing: tuple[str, ...] = ()) -> float:
        return sum(loss.share for loss in e.lost(*kinds, doing=doing))

    exchanged = share("transfer", doing=("transfer", "wait")) + _in_turns(e)
    return [
        Witness("sharing", of_step("sharing"), None),
        Witness("uneven", of_step("uneven"), _longer(e.report)),
        Witness("exchange", of_step("exchange"), exchanged),
        Witness("input", of_step("input"), share("input", doing=("input",))),
        Witness("validation", of_step("validation"), share("validation", doing=("validation",))),
        Witness("checkpoint", of_step("checkpoint"), share("checkpoint", doing=("checkpoint",))),
        Witness("script", None, share("other")),
    ]


def _in_turns(e: Evidence) -> float:
    """Waits for ranks that were late now and then: those for nobody in particular, and those for
    computing without what the slower ranks always compute longer."""
    late = sum(loss.share for loss in e.lost(doing=("useful", "other")))
    own = [rank["useful"] + rank["other"] for rank in e.report.states]
    always = sum(max(own) - one for one in own) / len(own) if own else 0.0
    unbooked = sum(x.share for x in e.report.losses if x.kind == "wait" and x.rank is None)
    return unbooked + max(late - always, 0.0)


def _longer(report: Report) -> float:
    """What the slowest rank computes longer than the fastest, of a step's time."""
    own = [rank["useful"] + rank["other"] for rank in report.states]
    return max(own) - min(own) if own else 0.0


Rule = Callable[[Evidence, Witness], tuple[str, str, dict[str, Any]] | None]


def _sharing(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]]:
    evidence = {"threads": e.threads, "cores": e.cores, "ranks_on_a_host": e.per_host}
    if e.threads and e.cores and e.threads * e.per_host > e.cores:
        return (
            "too-many-threads",
            f"{e.per_host} ranks with {e.threads} threads each share {e.cores} cores",
            evidence,
        )
    return (
        "shared-machine",
        "the ranks of a host slow each other: they share its memory's bandwidth, its caches and "
        "its cores",
        evidence,
    )


def _uneven(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]] | None:
    late = e.lost(doing=("useful", "other"))
    if not late:
        return None
    loss = max(late, key=lambda loss: loss.share)
    rank, host = loss.rank, loss.host
    sentence = f"rank {rank} on {host} takes longer for its steps, and all others wait for it"
    return "slow-rank", sentence, {"rank": rank, "host": host, "steps": loss.steps}


def _exchange(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]] | None:
    if not e.report.groups:
        return None
    group = max(e.report.groups, key=lambda group: group.transfer + group.wait)
    calls = _main(group)
    if calls is None:
        return None
    itself, turns = sum(loss.share for loss in e.lost("transfer")), _in_turns(e)
    if itself < turns:
        sentence = "ranks are late in turns: their steps differ, or the machine is noisy"
        return "jitter", sentence, {"waits": turns, "exchange_itself": itself}
    size = calls.bytes / max(calls.count, 1)
    a_step = calls.count / e.steps
    evidence = {
        "collective": calls.name,
        "bytes": size,
        "calls_a_step": a_step,
        "busbw_GB_s": calls.busbw,
        "hidden": calls.hidden,
    }
    if size < SMALL:
        each = f"{a_step:.3g} {calls.name} a step of {size:,.0f} bytes each"
        sentence = f"{each}: the exchange is its latency"
        return "exchange-latency", sentence, evidence
    rate = f" at {calls.busbw:.2g} GB/s" if calls.busbw is not None else ""
    covered = calls.hidden <= HIDDEN * (calls.wait + calls.transfer)
    nothing = ", and nothing of it is covered by computing" if covered else ""
    sentence = f"{calls.name} of {size / 1e6:.3g} MB each{rate}: the exchange itself{nothing}"
    return "exchange-bandwidth", sentence, evidence


def _main(group: Group) -> Any:
    return max(group.collectives, key=lambda one: one.wait + one.transfer, default=None)


def _input(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]]:
    losses = e.lost("input", doing=("input",))
    evidence: dict[str, Any] = {"most_on": sorted({x.rank for x in losses if x.rank is not None})}
    if e.loader is None or not e.loader["seconds"]:
        return "input", "the next batch was not there in time", evidence
    busy = e.loader["busy_s"] / e.loader["seconds"]
    workers = e.loader["workers"] / e.loader["ranks"]
    evidence |= {"cores_busy_a_rank": busy, "workers": workers, **e.loader}
    each = f"{1e3 * e.loader['seconds'] / e.loader['batches']:.3g} ms a batch"
    who = f"{workers:.3g} workers a rank" if workers else "no workers: the rank loads by itself"
    if busy >= WAITING:
        sentence = f"batches take the processor {each} to make ({who})"
        return "input-preprocessing", sentence, evidence
    return "input-waiting", f"the loader waits for its files, {each} ({who})", evidence


def _one_rank(kind: str) -> Rule:
    """Validation and saving: by one rank while the others wait, or by all."""

    def rule(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]] | None:
        waits, own = e.lost(doing=(kind,)), e.lost(kind)
        what = {"validation": "evaluates", "checkpoint": "saves"}[kind]
        if waits:
            rank = max(waits, key=lambda loss: loss.share).rank
            sentence = f"rank {rank} {what} alone while all others wait"
            return f"{kind}-on-one-rank", sentence, {"rank": rank}
        most = max(own, key=lambda loss: loss.share)
        return kind, f"training stands still while it {what}", {"rank": most.rank}

    return rule


def _script(e: Evidence, _: Witness) -> tuple[str, str, dict[str, Any]] | None:
    losses = e.lost("other")
    lines = [line for loss in losses for line in loss.lines]
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    return "script", f"the script does work of its own between its steps{where}", {"lines": lines}


# What a witness names, and the rule that says more of it.
RULES: dict[str, Rule] = {
    "sharing": _sharing,
    "uneven": _uneven,
    "exchange": _exchange,
    "input": _input,
    "validation": _one_rank("validation"),
    "checkpoint": _one_rank("checkpoint"),
    "script": _script,
}


def causes(e: Evidence) -> list[Cause]:
    """Those that are worth a word, the largest first; none, if nothing holds it back."""
    found = []
    for witness in witnesses(e):
        share, interval = _share(witness)
        if share < WORTH or not _seen(witness):
            continue
        said = RULES[witness.name](e, witness)
        if said is not None:
            name, sentence, evidence = said
            found.append(Cause(name, share, interval, sentence, evidence))
    return sorted(found, key=lambda cause: -cause.share)


def _seen(witness: Witness) -> bool:
    """Whether all who can see it have seen it."""
    experiment = witness.ladder is None or witness.ladder.sure
    return experiment and (witness.record is None or witness.record >= WORTH / 2)


def unsure(w: Waterfall) -> list[str]:
    """Bars that are worth a word, and may be nothing."""
    return [bar.id for bar in w.bars if bar.of_step.mean >= WORTH and not bar.of_step.sure]


def _share(witness: Witness) -> tuple[float, tuple[float, float]]:
    """The experiment's figure where there is one; an interval that holds both."""
    if witness.ladder is None:
        share = witness.record or 0.0
        return share, (share, share)
    told = [witness.ladder.low, witness.ladder.high]
    told += [witness.record] if witness.record is not None else []
    return witness.ladder.mean, (min(told), max(told))
