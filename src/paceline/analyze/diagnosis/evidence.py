"""What the rules of ``causes`` look at: the ladder's rungs, the record's report, and what each rank
said of its script. Every share is of the time that a real step takes, of a mean rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..figures.losses import Loss
from ..figures.report import Report
from .gradient_sync import Gradients
from .ladder import Climb, Interval, Waterfall

Said = tuple[str, str, dict[str, Any]]  # a cause's id, sentence and evidence
WORTH = 0.05  # of a step: what takes less is not worth a word
SMALL = 256 << 10  # bytes: below, an exchange or a file is its latency


@dataclass(frozen=True)
class Evidence:
    """loader: of all ranks' loaders alone (record/experiments/experiment.py), None
    where no loader was seen.
    cores: of a host that its ranks may use, threads: of a rank; per_host: ranks; steps: measured.
    facts: of each rank (record/experiments/observer.py). lines: of the
    script, by the state that ranks were in.
    late: when a rank is slower."""

    waterfall: Waterfall
    report: Report
    loader: dict[str, float] | None
    threads: int | None
    cores: int | None
    per_host: int
    steps: int
    climbs: dict[str, list[Climb]] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    gradients: Gradients | None = None
    lines: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    late: Callable[[int], str] = lambda rank: ""

    def lost(self, *kinds: str, doing: tuple[str, ...] = ()) -> list[Loss]:
        """Losses of these kinds, and waits for ranks that did one of ``doing`` longer."""
        return [
            loss
            for loss in self.report.losses
            if loss.kind in kinds or (loss.kind == "wait" and loss.doing in doing)
        ]

    def share(self, *kinds: str, doing: tuple[str, ...] = ()) -> float:
        return sum(loss.share for loss in self.lost(*kinds, doing=doing))

    @cached_property
    def in_turns(self) -> float:
        """Waits for ranks that were late now and then: those for nobody in particular, and those
        for computing without what the slower ranks always compute longer."""
        late = self.share(doing=("useful", "other"))
        own = [rank["useful"] + rank["other"] for rank in self.report.states]
        always = sum(max(own) - one for one in own) / len(own) if own else 0.0
        unbooked = sum(x.share for x in self.report.losses if x.kind == "wait" and x.rank is None)
        return unbooked + max(late - always, 0.0)

    @cached_property
    def longer(self) -> float:
        """What the slowest rank computes longer than the fastest."""
        own = [rank["useful"] + rank["other"] for rank in self.report.states]
        return max(own) - min(own) if own else 0.0

    def used(self, rung: str, name: str) -> float:
        """Seconds a second of a rung's phase: the mean of its ranks and rounds."""
        found = [
            one[name] / one["seconds"]
            for climbed in self.climbs.get(rung, [])
            for one in climbed.used
            if name in one and one.get("seconds")
        ]
        return sum(found) / len(found) if found else 0.0

    def off_core(self, rung: str, rank: int) -> float:
        """The share of a rung's phase in which no thread of the rank was on a core, and the one
        that trains did not ask for one: the mean of all rounds."""
        told = [one.used[rank] for one in self.climbs.get(rung, [])]
        found = [
            1 - (used["process"] + used["delayed"]) / used["seconds"]
            for used in told
            if used.get("seconds")
        ]
        return max(sum(found) / len(found), 0.0) if found else 0.0

    def batch(self, rung: str) -> float:
        """Samples of a rank's step; 0 where the rung was not run."""
        found = [one.together * one.step_s / one.ranks for one in self.climbs.get(rung, [])]
        return sum(found) / len(found) if found else 0.0

    @property
    def step_s(self) -> float:
        """Of a real step, with everything: the mean of its rounds."""
        found = [one.step_s for one in self.climbs.get("everything", [])]
        return sum(found) / len(found) if found else 0.0

    def of_step(self, rung: str) -> float:
        """How long a step of a rung takes, in steps with everything."""
        both = zip(self.climbs.get(rung, []), self.climbs.get("everything", []), strict=False)
        found = [one.step_s / real.step_s for one, real in both]
        return sum(found) / len(found) if found else 0.0

    def gained(self, rung: str, against: str) -> Interval | None:
        """By what a step of a rung is shorter than of another one, of a step with everything."""
        names = (rung, against, "everything")
        climbs = [self.climbs.get(name, []) for name in names]
        if not all(climbs):
            return None
        each = zip(*climbs, strict=False)
        return Interval.of([(b.step_s - a.step_s) / real.step_s for a, b, real in each])

    @cached_property
    def foreign(self) -> float:
        """Cores that others than the job kept busy, of those that its ranks may use, while it ran
        as it is: of the host with most. What one kernel runs is one host."""
        found: dict[tuple[str, str], list[float]] = {}
        for climbed in self.climbs.get("everything", []):
            hosts: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for host, facts, one in zip(self.report.hosts, self.facts, climbed.used, strict=False):
                if one.get("seconds") and one.get("host"):
                    place = (str(facts.get("kernel", host)), str(facts.get("mask")))
                    hosts.setdefault(place, []).append(one)
            for place, ranks in hosts.items():
                own = sum((r["process"] + r["children"]) / r["seconds"] for r in ranks)
                busy = sum(r["host"] / r["seconds"] for r in ranks) / len(ranks)
                found.setdefault(place, []).append(max(busy - own, 0.0))
        return max((sum(each) / len(each) for each in found.values()), default=0.0)

    @cached_property
    def delayed(self) -> float:
        """The share of a rank's time in which it could compute and had no core."""
        return self.used("everything", "delayed")

    @cached_property
    def delayed_each(self) -> float:
        """The same, of the rank that waits least."""
        rounds = self.climbs.get("everything", [])
        each = zip(*(one.used for one in rounds), strict=False)
        found = [
            [used["delayed"] / used["seconds"] for used in rank if used.get("seconds")]
            for rank in each
        ]
        return min((sum(one) / len(one) for one in found if one), default=0.0)

    @cached_property
    def crowded(self) -> float:
        """The share of a rank's time in which threads beside the one that trains could compute and
        had no core, where ranks exchange: beyond what they wait without exchange."""
        return max(self.used("everything", "crowded") - self.used("silent", "crowded"), 0.0)

    @property
    def said(self) -> dict[str, Any]:
        """What the first rank said of the script; most of it is the same on all."""
        return self.facts[0] if self.facts else {}
