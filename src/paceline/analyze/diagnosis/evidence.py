"""The evidence for ``causes``: the ladder's rungs, the report, and facts from each rank.

Unless stated otherwise, shares are fractions (0 to 1) of the step time of the unchanged script,
averaged over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...significance import RankSpread, rank_spread
from ..figures.losses import Loss
from ..figures.report import Report
from ..figures.sharded_blocks import ShardedModel
from .exchanged_calls import ExchangedCalls, GradientSync
from .lateness import COMPUTING
from .line_profile import LineProfile
from .rare_events import is_rare
from .rungs import Interval, RungResult, Waterfall

NamedCause = tuple[str, str, dict[str, Any]]  # a cause's id, sentence and evidence
MIN_SHARE = 0.05  # of a step's time; smaller losses are not reported
LATENCY_BOUND_BYTES = 256 << 10  # latency dominates smaller exchanges and files


@dataclass(frozen=True)
class Evidence:
    """Measurements of one ``paceline diagnose``, the input of the rules.

    Attributes:
        waterfall: Lost time of a step, by rung of the ladder.
        report: Report of the run of the unchanged script.
        loader: Figures of all ranks' loaders alone (record/experiments/experiment.py); None if no
            loader was seen.
        threads: Threads that torch uses in one rank.
        cores: Cores of one host that its ranks may use together.
        per_host: Ranks per host.
        steps: Measured steps.
        rungs: Results of each rung, one per repetition, by the rung's name
            (record/experiments/rung.py).
        facts: Facts of each rank, by rank (record/experiments/observer.py).
        gradients: Exchange of gradients in the run of the unchanged script.
        lines: Lines of the script, by the state that ranks were in.
        rank_spread: Constant differences between the ranks' computing times in the run of the
            unchanged script; None if unknown.
        line_profile: Time by line of the script, of all rounds; None if nothing was sampled.
        rare_losses: Losses by validation and checkpoints in a survey of many steps, which replace
            those of the report; None without a survey.
        exchanged: Collectives of the run of the unchanged script, by what they carry and their
            line; empty if unknown.
        sharded: Blocks of the sharded model (FSDP2); None without one.
        describe_lateness: Returns since when, or how often, a rank is late; empty if unknown.
        savings: By name of a switched phase (rung.py): share of a step that its part takes, by
            pair of neighbouring blocks of steps.
    """

    waterfall: Waterfall
    report: Report
    loader: dict[str, float] | None
    threads: int | None
    cores: int | None
    per_host: int
    steps: int
    rungs: dict[str, list[RungResult]] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    gradients: GradientSync | None = None
    lines: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    rank_spread: RankSpread | None = None
    line_profile: LineProfile | None = None
    describe_lateness: Callable[[int], str] = lambda rank: ""
    savings: dict[str, list[float]] = field(default_factory=dict)
    rare_losses: list[Loss] | None = None
    exchanged: list[ExchangedCalls] = field(default_factory=list)
    sharded: ShardedModel | None = None

    def losses_of_kind(self, *kinds: str, doing: tuple[str, ...] = ()) -> list[Loss]:
        """Return losses of these kinds, and waits for ranks that were longer in ``doing``."""
        return [
            loss
            for loss in self._losses
            if loss.kind in kinds or (loss.kind == "wait" and loss.doing in doing)
        ]

    @cached_property
    def _losses(self) -> list[Loss]:
        if self.rare_losses is None:
            return self.report.losses
        return [*(loss for loss in self.report.losses if not is_rare(loss)), *self.rare_losses]

    def loss_share(self, *kinds: str, doing: tuple[str, ...] = ()) -> float:
        """Return the sum of the shares of ``losses_of_kind``."""
        return sum(loss.share for loss in self.losses_of_kind(*kinds, doing=doing))

    @cached_property
    def occasional_waits(self) -> float:
        """Share of waits that no single rank explains.

        These are waits without a known late rank, and waits for computation beyond the constant
        difference between the ranks.
        """
        late = self.loss_share(doing=COMPUTING)
        constant = max(self._computing_spread.longest_minus_mean, 0.0)
        unattributed = sum(
            x.share for x in self.report.losses if x.kind == "wait" and x.rank is None
        )
        return unattributed + max(late - constant, 0.0)

    @cached_property
    def compute_imbalance(self) -> float:
        """Constant difference between the longest and the shortest computing time of the ranks.

        As a share of the measured time, without what the slowest of equal ranks takes longer by
        chance.
        """
        return max(self._computing_spread.longest_minus_shortest, 0.0)

    @cached_property
    def _computing_spread(self) -> RankSpread:
        if self.rank_spread is not None:
            return self.rank_spread
        computing = [[sum(rank[name] for name in COMPUTING)] for rank in self.report.states]
        return rank_spread(np.array(computing)) if computing else RankSpread(0.0, 0.0)

    @property
    def useful_share(self) -> float:
        """Share of a step in which the ranks compute; mean of the ranks."""
        own = [rank["useful"] for rank in self.report.states]
        return sum(own) / len(own) if own else 0.0

    def used(self, rung: str) -> list[dict[str, Any]]:
        """Return what each rank used in each round of a rung, where it was measured."""
        every = [used for result in self.rungs.get(rung, []) for used in result.used]
        return [used for used in every if used.get("seconds")]

    def mean_usage(self, rung: str, resource: str) -> float:
        """Return the mean rate of a resource in a rung: its counter divided by the phase's seconds.

        Dimensionless for times, 1/s for ``faults``; 0.0 if it was not measured. ``read_usage``
        (record/ring/resource_usage.py) has the names.
        """
        found = [used[resource] / used["seconds"] for used in self.used(rung) if resource in used]
        return sum(found) / len(found) if found else 0.0

    def off_core(self, rung: str, rank: int) -> float:
        """Return the share of a rung's phase in which a rank used no core and waited for none.

        No thread of the rank was on a core, and the training thread did not ask for one. Mean of
        all rounds.
        """
        used_by_round = [result.used[rank] for result in self.rungs.get(rung, [])]
        found = [
            1 - (used["process"] + used["delayed"]) / used["seconds"]
            for used in used_by_round
            if used.get("seconds")
        ]
        return max(sum(found) / len(found), 0.0) if found else 0.0

    def samples_per_step(self, rung: str) -> float:
        """Return the samples per step of a rank; 0 if the rung was not run."""
        found = [
            result.together * result.step_s / result.ranks for result in self.rungs.get(rung, [])
        ]
        return sum(found) / len(found) if found else 0.0

    @property
    def step_s(self) -> float:
        """Return the mean duration of a step with nothing switched off, in seconds."""
        found = [result.step_s for result in self.rungs.get("everything", [])]
        return sum(found) / len(found) if found else 0.0

    def relative_step_time(self, rung: str) -> float:
        """Return the duration of a rung's step, relative to a step with everything."""
        both = zip(self.rungs.get(rung, []), self.rungs.get("everything", []), strict=False)
        found = [one.step_s / real.step_s for one, real in both]
        return sum(found) / len(found) if found else 0.0

    def step_time_saving(self, rung: str, against: str) -> Interval | None:
        """Return (step of ``against`` - step of ``rung``) / step of "everything".

        None if one of the rungs was not run.
        """
        names = (rung, against, "everything")
        results = [self.rungs.get(name, []) for name in names]
        if not all(results):
            return None
        each = zip(*results, strict=False)
        return Interval.of([(b.step_s - a.step_s) / real.step_s for a, b, real in each])

    @cached_property
    def foreign_busy_cores(self) -> float:
        """Number of cores that other programs kept busy, of those that the job's ranks may use.

        Measured while the script ran unchanged, on the host with most. Ranks with the same kernel
        and affinity mask count as one host.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for result in self.rungs.get("everything", []):
            hosts: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for host, facts, one in zip(self.report.hosts, self.facts, result.used, strict=False):
                if one.get("seconds") and one.get("host"):
                    place = (str(facts.get("kernel", host)), str(facts.get("mask")))
                    hosts.setdefault(place, []).append(one)
            for place, ranks in hosts.items():
                job_cores = sum((r["process"] + r["children"]) / r["seconds"] for r in ranks)
                busy = sum(r["host"] / r["seconds"] for r in ranks) / len(ranks)
                found.setdefault(place, []).append(max(busy - job_cores, 0.0))
        return max((sum(each) / len(each) for each in found.values()), default=0.0)

    @cached_property
    def cpu_wait_share(self) -> float:
        """Share of time in which the training thread was runnable but had no core."""
        return self.mean_usage("everything", "delayed")

    @cached_property
    def foreign_wait_share(self) -> float:
        """Part of ``cpu_wait_share`` that other programs explain, at most.

        While another program uses one core, one rank waits for it. Other waits are for threads of
        the job itself.
        """
        return min(self.cpu_wait_share, self.foreign_busy_cores / max(self.per_host, 1))

    @cached_property
    def min_cpu_wait_share(self) -> float:
        """``cpu_wait_share`` of the rank with the smallest share."""
        rounds = self.rungs.get("everything", [])
        each = zip(*(result.used for result in rounds), strict=False)
        found = [
            [used["delayed"] / used["seconds"] for used in rank if used.get("seconds")]
            for rank in each
        ]
        return min((sum(shares) / len(shares) for shares in found if shares), default=0.0)

    @cached_property
    def other_threads_cpu_wait_share(self) -> float:
        """``cpu_wait_share`` of the threads other than the training thread, due to communication.

        It is the difference between the rungs with and without communication.
        """
        with_communication = self.mean_usage("everything", "crowded")
        return max(with_communication - self.mean_usage("silent", "crowded"), 0.0)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the parameters of the first rank; 0 if unknown."""
        return float(sum(self.first_facts.get("parameters", {}).values()))

    @property
    def first_facts(self) -> dict[str, Any]:
        """Facts of the first rank; most of them are the same on all ranks."""
        return self.facts[0] if self.facts else {}
