"""Parts of a step at one size, from the figures of its runs: what a scaling law is fitted to.

A part is the time that ranks spend in a state, and the time in which others wait for them because
of it. So the parts of a size add up to its step.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ...plurals import parse_ranges
from ..figures.compare_runs import BETWEEN_RUNS
from .derived import relative_error
from .study_model import RunFigures, SizePoint

# Parts of a step. "slow-rank" and "jitter" are waits for computing: of a rank that always computes
# longer, and of whichever rank is late. The former contains what that rank computes longer.
COMPUTE, SLOW_RANK, JITTER = "compute", "slow-rank", "jitter"
INPUT, VALIDATION, CHECKPOINT, SCRIPT = "input", "validation", "checkpoint", "script"
STARVED, EXCHANGE = "starved", "exchange"
PARTS = (COMPUTE, SLOW_RANK, JITTER, INPUT, VALIDATION, CHECKPOINT, SCRIPT, STARVED, EXCHANGE)
_PART_OF = {
    "useful": COMPUTE,
    "input": INPUT,
    "validation": VALIDATION,
    "checkpoint": CHECKPOINT,
    "other": SCRIPT,
    "starved": STARVED,
    "transfer": EXCHANGE,
    "bubble": JITTER,
}
LEAST_PART = 1e-3  # of a step: a smaller part varies as one of this size
ASSUMED_RUNS = 2  # weight of the assumed spread between runs, as that of as many measured runs


@dataclass(frozen=True)
class ExchangeLoad:
    """Collectives of one kind in a step.

    Attributes:
        kind: As in the report: "all-reduce".
        members: Size of the group.
        grows: Whether the group grows with the number of ranks, as one of all ranks does.
        calls, bytes: Per step, mean of the ranks; bytes of the whole vector.
        seconds: Per step, mean of the ranks: exposed, and in flight under computing.
        exposed: The part of it in which ranks were blocked.
    """

    kind: str
    members: int
    grows: bool
    calls: float
    bytes: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class SizeCosts:
    """Seconds per step of each part at one size: mean of the ranks and of the runs.

    Attributes:
        ranks: Number of ranks, on ``hosts`` nodes, at most ``per_host`` on one.
        cores: Cores of a node that its ranks may use; None if unknown.
        threads: Threads of a rank; None if unknown.
        batch: Samples per rank and step.
        step_s: Duration of a step; the sum of ``parts``. ``error``: its standard error.
        parts: By name of PARTS.
        errors: Standard error of each part.
        waits: Of each part, what others wait for.
        late: Of each part, the rank that most of the waits are for, and its share of them.
        exchanges: The collectives.
        quantiles: 0, 5, ..., 100 % quantiles of the ranks' time outside communication; empty if
            unknown.
        other_cores: Cores that other programs used.
    """

    ranks: int
    hosts: int
    per_host: int
    cores: int | None
    threads: int | None
    batch: float
    step_s: float
    error: float
    parts: dict[str, float]
    errors: dict[str, float]
    waits: dict[str, float] = field(default_factory=dict)
    late: dict[str, tuple[int, float]] = field(default_factory=dict)
    exchanges: list[ExchangeLoad] = field(default_factory=list)
    quantiles: list[float] = field(default_factory=list)
    other_cores: float | None = None

    @property
    def per_sample_s(self) -> float:
        """Seconds of a rank per sample: what an efficiency compares between sizes."""
        return self.step_s / self.batch

    @property
    def throughput(self) -> float:
        """Samples/s of the whole job."""
        return self.ranks * self.batch / self.step_s


def costs_of_points(points: Iterable[SizePoint]) -> list[SizeCosts]:
    """Return the costs of every measured setup, each once, by ranks and batch."""
    found = {}
    for point in points:
        costs = size_costs(point)
        if costs is not None:
            found[point.ranks, point.setup.global_batch] = costs
    return _with_growing_groups([found[key] for key in sorted(found)])


def _with_growing_groups(costs: Sequence[SizeCosts]) -> list[SizeCosts]:
    """Return the costs with ``grows`` for groups that have the same part of the ranks at two sizes.

    Data-parallel groups do, and tensor-parallel groups keep their size.
    """

    def part(load: ExchangeLoad, one: SizeCosts) -> tuple[str, float]:
        return load.kind, load.members / one.ranks

    sizes: dict[tuple[str, float], set[int]] = {}
    for size in costs:
        for load in size.exchanges:
            sizes.setdefault(part(load, size), set()).add(size.ranks)
    return [
        replace(
            size,
            exchanges=[
                replace(load, grows=load.grows or len(sizes[part(load, size)]) > 1)
                for load in size.exchanges
            ],
        )
        for size in costs
    ]


def size_costs(point: SizePoint) -> SizeCosts | None:
    """Return the costs of a size; None without a run whose steps and samples are known."""
    runs = [run for run in point.figures if run.mean_step_s > 0 and run.samples_per_step > 0]
    if not runs:
        return None
    each = [_run_parts(run, point.ranks) for run in runs]
    parts = {name: statistics.fmean(parts[name] for parts, _ in each) for name in PARTS}
    waits = {name: statistics.fmean(waits[name] for _, waits in each) for name in PARTS}
    step_s = sum(parts.values())
    within = max((error for run in runs if (error := relative_error(run))), default=0.0)
    errors = {
        name: _error([one[name] for one, _ in each], within * _spread(step_s, parts[name]), step_s)
        for name in PARTS
    }
    hosts = {place.host: len(parse_ranges(place.ranks)) for place in runs[0].placement}
    placed = runs[0].placement[0] if runs[0].placement else None
    others = [x for run in runs if (x := run.machine.other_cores) is not None]
    count = max(point.hosts, len(hosts), 1)
    return SizeCosts(
        ranks=point.ranks,
        hosts=count,
        per_host=max(hosts.values(), default=math.ceil(point.ranks / count)),
        cores=_cores(runs[0]),
        threads=placed.threads if placed is not None else None,
        batch=statistics.fmean(run.samples_per_step for run in runs) / point.ranks,
        step_s=step_s,
        error=_error([sum(one.values()) for one, _ in each], within * step_s, step_s),
        parts=parts,
        errors=errors,
        waits=waits,
        late=_late_ranks(runs),
        exchanges=_exchanges(runs, point.ranks),
        quantiles=_mean_lists([run.spread.busy_quantiles_s for run in runs]),
        other_cores=statistics.fmean(others) if others else None,
    )


def _run_parts(run: RunFigures, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the parts of one run, and what others wait for in each."""
    states = run.seconds
    own = {part: float(getattr(states, state)) for state, part in _PART_OF.items()}
    own |= dict.fromkeys((SLOW_RANK, JITTER), 0.0)
    waits = dict.fromkeys(PARTS, 0.0)
    computing = 0.0
    for wait in run.waits:
        if wait.doing == "useful":
            computing += wait.seconds
        elif wait.doing in _PART_OF:
            waits[_PART_OF[wait.doing]] += wait.seconds
        else:
            waits[EXCHANGE] += wait.seconds
    known = computing + sum(waits.values())
    waits[EXCHANGE] += max(states.wait - known, 0.0)
    waits[SLOW_RANK] = min(computing, _constant_excess(run, ranks))
    waits[JITTER] = computing - waits[SLOW_RANK]
    if ranks > 1:  # what the slow rank itself computes longer than the others
        own[SLOW_RANK] = min(waits[SLOW_RANK] / (ranks - 1), own[COMPUTE])
        own[COMPUTE] -= own[SLOW_RANK]
    return {name: own[name] + waits[name] for name in PARTS}, waits


def _constant_excess(run: RunFigures, ranks: int) -> float:
    """Return by how much the slowest rank computes longer than the mean in every step.

    0 where the slowest of equal ranks is as much longer by chance, in as many steps.
    """
    means = run.spread.own_mean_s
    if len(means) < 2 or not run.step_s:
        return 0.0
    excess = max(means) - statistics.fmean(means)
    chance = normal_max(ranks) * run.spread.busy_sd_s / math.sqrt(len(run.step_s))
    return math.sqrt(max(excess**2 - chance**2, 0.0))


def _late_ranks(runs: Sequence[RunFigures]) -> dict[str, tuple[int, float]]:
    sums: dict[str, dict[int | None, float]] = {}
    for run in runs:
        for wait in run.waits:
            if wait.doing is None:
                continue
            part = _PART_OF.get(wait.doing, EXCHANGE)
            by_rank = sums.setdefault(part, {})
            by_rank[wait.rank] = by_rank.get(wait.rank, 0.0) + wait.seconds
    found = {}
    for part, by_rank in sums.items():
        whole = sum(by_rank.values())
        known = {rank: seconds for rank, seconds in by_rank.items() if rank is not None}
        rank = max(known, key=lambda rank: known[rank], default=None)
        if rank is not None and whole > 0:
            found[part] = (rank, known[rank] / whole)
    for part in (SLOW_RANK, JITTER):
        if COMPUTE in found:
            found[part] = found[COMPUTE]
    return found


def _exchanges(runs: Sequence[RunFigures], ranks: int) -> list[ExchangeLoad]:
    """Return the collectives of the first run, with the mean times of all runs by kind."""
    result = []
    for load in runs[0].collectives:
        if load.size < 2 or not load.calls:
            continue
        same = [
            other
            for run in runs
            for other in run.collectives
            if (other.group, other.kind) == (load.group, load.kind)
        ]
        exposed = statistics.fmean(other.transfer for other in same)
        flying = statistics.fmean(other.overlapped for other in same)
        share = load.size / ranks  # of the ranks are members
        result.append(
            ExchangeLoad(
                load.kind,
                load.size,
                load.size == ranks,
                load.calls * share,
                load.bytes * share,
                (exposed + flying) * share,
                exposed * share,
            )
        )
    return result


def _cores(run: RunFigures) -> int | None:
    """Return the cores of the first host that its ranks may use together."""
    if not run.placement:
        return None
    first = run.placement[0].host
    found: set[int] = set()
    for place in run.placement:
        if place.host == first and place.cores:
            found.update(parse_ranges(place.cores))
    return len(found) or None


def _spread(step_s: float, part: float) -> float:
    """Return how much a part varies if its step varies by its whole duration.

    The variances of the parts of a step add up to that of the step.
    """
    return math.sqrt(step_s * max(part, LEAST_PART * step_s))


def _error(values: Sequence[float], within: float, step_s: float) -> float:
    """Return the standard error of the mean of runs.

    The spread between few runs is itself uncertain. It is averaged with the assumed one of
    compare_runs.py, which counts as ``ASSUMED_RUNS`` further runs.
    """
    mean = statistics.fmean(values)
    assumed = BETWEEN_RUNS * _spread(step_s, mean)
    n = len(values)
    measured = statistics.variance(values) if n > 1 else 0.0
    variance = (ASSUMED_RUNS * assumed**2 + (n - 1) * measured) / (ASSUMED_RUNS + n - 1)
    return math.sqrt((variance + within**2) / n)


def _mean_lists(each: Sequence[Sequence[float]]) -> list[float]:
    known = [values for values in each if values and len(values) == len(each[0])]
    return [statistics.fmean(column) for column in zip(*known, strict=True)]


@lru_cache(1024)
def normal_max(count: int) -> float:
    """Return the expectation of the largest of ``count`` standard normal numbers."""
    if count < 2:
        return 0.0
    dist = statistics.NormalDist()
    points = 2000
    return statistics.fmean(
        dist.inv_cdf(((i + 0.5) / points) ** (1 / count)) for i in range(points)
    )


def quantile_max(quantiles: Sequence[float], count: int) -> float:
    """Return E[max of ``count`` draws] less the mean of one, from evenly spaced quantiles."""
    if count < 2 or len(quantiles) < 2:
        return 0.0
    uniform = (np.arange(2000) + 0.5) / 2000
    at = np.linspace(0.0, 1.0, len(quantiles))
    largest, each = (np.interp(u, at, quantiles) for u in (uniform ** (1 / count), uniform))
    return float(largest.mean() - each.mean())
