"""The evidence for ``causes``: the ladder's rungs, the report, and facts from each rank.

Every share is of the time that a real step takes, of a mean rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..figures.losses import Loss
from ..figures.report import Report
from .gradient_sync import GradientSync
from .ladder import Interval, RungResult, Waterfall

NamedCause = tuple[str, str, dict[str, Any]]  # a cause's id, sentence and evidence
WORTH = 0.05  # of a step: smaller shares are not reported
LATENCY_BOUND_BYTES = 256 << 10  # latency dominates smaller exchanges and files


@dataclass(frozen=True)
class Evidence:
    """What is known about a run.

    Attributes:
        loader: Figures of all ranks' loaders alone (record/experiments/experiment.py); None where
            no
            loader was seen.
        threads: Of one rank.
        cores: Of a host, that its ranks may use.
        per_host: Ranks per host.
        steps: Measured steps.
        facts: Of each rank (record/experiments/observer.py).
        lines: Lines of the script, by the state that ranks were in.
        late: Returns when a rank is slower than others.
    """

    waterfall: Waterfall
    report: Report
    loader: dict[str, float] | None
    threads: int | None
    cores: int | None
    per_host: int
    steps: int
    climbs: dict[str, list[RungResult]] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    gradients: GradientSync | None = None
    lines: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    late: Callable[[int], str] = lambda rank: ""

    def lost(self, *kinds: str, doing: tuple[str, ...] = ()) -> list[Loss]:
        """Return losses of these kinds, and waits for ranks that were longer in one of
        ``doing``.
        """
        return [
            loss
            for loss in self.report.losses
            if loss.kind in kinds or (loss.kind == "wait" and loss.doing in doing)
        ]

    def share(self, *kinds: str, doing: tuple[str, ...] = ()) -> float:
        return sum(loss.share for loss in self.lost(*kinds, doing=doing))

    @cached_property
    def occasional_waits(self) -> float:
        """Share of waits for ranks that were late only at times.

        These are waits without a known culprit, and waits for computing beyond what the slower
        ranks always compute longer.
        """
        late = self.share(doing=("useful", "other"))
        own = [rank["useful"] + rank["other"] for rank in self.report.states]
        always = sum(max(own) - one for one in own) / len(own) if own else 0.0
        unbooked = sum(x.share for x in self.report.losses if x.kind == "wait" and x.rank is None)
        return unbooked + max(late - always, 0.0)

    @cached_property
    def longer(self) -> float:
        """Share by which the slowest rank computes longer than the fastest."""
        own = [rank["useful"] + rank["other"] for rank in self.report.states]
        return max(own) - min(own) if own else 0.0

    def used(self, rung: str, name: str) -> float:
        """Return seconds per second of a rung's phase: the mean over its ranks and rounds."""
        found = [
            one[name] / one["seconds"]
            for climbed in self.climbs.get(rung, [])
            for one in climbed.used
            if name in one and one.get("seconds")
        ]
        return sum(found) / len(found) if found else 0.0

    def off_core(self, rung: str, rank: int) -> float:
        """Return the share of a rung's phase in which a rank used no core and waited for none.

        No thread of the rank was on a core, and the training thread did not ask for one. Mean of
        all rounds.
        """
        used_by_round = [one.used[rank] for one in self.climbs.get(rung, [])]
        found = [
            1 - (used["process"] + used["delayed"]) / used["seconds"]
            for used in used_by_round
            if used.get("seconds")
        ]
        return max(sum(found) / len(found), 0.0) if found else 0.0

    def batch(self, rung: str) -> float:
        """Return the samples per step of a rank; 0 where the rung was not run."""
        found = [one.together * one.step_s / one.ranks for one in self.climbs.get(rung, [])]
        return sum(found) / len(found) if found else 0.0

    @property
    def step_s(self) -> float:
        """Return the mean duration of a step with nothing switched off, in seconds."""
        found = [one.step_s for one in self.climbs.get("everything", [])]
        return sum(found) / len(found) if found else 0.0

    def of_step(self, rung: str) -> float:
        """Return the duration of a rung's step, relative to a step with everything."""
        both = zip(self.climbs.get(rung, []), self.climbs.get("everything", []), strict=False)
        found = [one.step_s / real.step_s for one, real in both]
        return sum(found) / len(found) if found else 0.0

    def gained(self, rung: str, against: str) -> Interval | None:
        """Return by how much a rung's step is shorter than another's, relative to a full step."""
        names = (rung, against, "everything")
        climbs = [self.climbs.get(name, []) for name in names]
        if not all(climbs):
            return None
        each = zip(*climbs, strict=False)
        return Interval.of([(b.step_s - a.step_s) / real.step_s for a, b, real in each])

    @cached_property
    def foreign(self) -> float:
        """Cores that other programs kept busy, of those that the job's ranks may use.

        Measured while the script ran unchanged, on the host with most. Ranks with the same kernel
        and affinity mask count as one host.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for climbed in self.climbs.get("everything", []):
            hosts: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for host, facts, one in zip(self.report.hosts, self.facts, climbed.used, strict=False):
                if one.get("seconds") and one.get("host"):
                    place = (str(facts.get("kernel", host)), str(facts.get("mask")))
                    hosts.setdefault(place, []).append(one)
            for place, ranks in hosts.items():
                job_cores = sum((r["process"] + r["children"]) / r["seconds"] for r in ranks)
                busy = sum(r["host"] / r["seconds"] for r in ranks) / len(ranks)
                found.setdefault(place, []).append(max(busy - job_cores, 0.0))
        return max((sum(each) / len(each) for each in found.values()), default=0.0)

    @cached_property
    def delayed(self) -> float:
        """Share of a rank's time in which it was runnable and had no core."""
        return self.used("everything", "delayed")

    @cached_property
    def delayed_each(self) -> float:
        """The same as ``delayed``, of the rank for which it is smallest."""
        rounds = self.climbs.get("everything", [])
        each = zip(*(one.used for one in rounds), strict=False)
        found = [
            [used["delayed"] / used["seconds"] for used in rank if used.get("seconds")]
            for rank in each
        ]
        return min((sum(one) / len(one) for one in found if one), default=0.0)

    @cached_property
    def crowded(self) -> float:
        """Share of a rank's time in which other threads than the training one lacked a core.

        While ranks communicate; what these threads lack without communication is subtracted.
        """
        return max(self.used("everything", "crowded") - self.used("silent", "crowded"), 0.0)

    @property
    def first_facts(self) -> dict[str, Any]:
        """Facts of the first rank; most of them are the same on all ranks."""
        return self.facts[0] if self.facts else {}
