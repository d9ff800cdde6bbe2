"""Compare two studies of a script: before and after a remedy, or two machines."""

import math
from dataclasses import dataclass

from ....plurals import counted
from ....significance import difference_of_runs
from ...figures.compare_runs import BETWEEN_RUNS
from ...records.state_timeline import STATES
from ..derived import Estimate, median_state, relative_error, scaling, throughput
from ..study_model import ScalingStudy, SizePoint

MIN_STATE_SHARE = 0.01  # of a step, by which a state must differ to be named


@dataclass(frozen=True)
class SizeChange:
    """One size in both studies.

    Attributes:
        before, after: The points.
        throughput: Samples/s of both.
        ratio: Throughput after over that before, with its 95 % interval.
        is_real: Whether the ratio differs from 1 by more than the noise, which equal studies exceed
            in 5 % of cases; None if it is not known.
        efficiency: Scaling efficiency of both; None if a study has no smaller size.
        state: The state whose time per sample changed most, "" if none did by 1 % of a step.
        state_s: Change of its time per step of ``before``, in s.
    """

    before: SizePoint
    after: SizePoint
    throughput: tuple[Estimate, Estimate]
    ratio: Estimate
    is_real: bool | None
    efficiency: tuple[float | None, float | None]
    state: str
    state_s: float

    @property
    def kind(self) -> str:
        return self.before.kind

    @property
    def ranks(self) -> int:
        return self.before.ranks


@dataclass(frozen=True)
class StudyComparison:
    """Two studies.

    Attributes:
        changes: The sizes that both have measured, by kind and ranks.
        only_before, only_after: Sizes of one study only, as (kind, ranks).
        differences: What else differs, in sentences.
    """

    before: ScalingStudy
    after: ScalingStudy
    changes: list[SizeChange]
    only_before: list[tuple[str, int]]
    only_after: list[tuple[str, int]]
    differences: list[str]


def compare_studies(before: ScalingStudy, after: ScalingStudy) -> StudyComparison:
    """Compare the sizes of two studies.

    Sizes are the same if their kind and number of ranks are; where their batches differ, the
    comparison says so, because samples/s of other batches are another problem.

    Raises:
        ValueError: No size was measured in both.
    """
    groups = [
        {(p.kind, p.ranks): p for p in study.points if throughput(p) is not None}
        for study in (before, after)
    ]
    common = [key for key in groups[0] if key in groups[1]]
    if not common:
        raise ValueError(
            f"{before.folder} and {after.folder} have no measured size in common. HINT: paceline "
            "scale with the same -n and the same kind of scaling"
        )
    efficiencies = [_efficiencies(study) for study in (before, after)]
    changes = [
        _change(
            groups[0][key], groups[1][key], (efficiencies[0].get(key), efficiencies[1].get(key))
        )
        for key in sorted(common)
    ]
    return StudyComparison(
        before,
        after,
        changes,
        sorted(key for key in groups[0] if key not in groups[1]),
        sorted(key for key in groups[1] if key not in groups[0]),
        _differences(before, after, changes),
    )


def _efficiencies(study: ScalingStudy) -> dict[tuple[str, int], float]:
    return {
        (kind, size.point.ranks): size.efficiency.value
        for kind in study.request.kinds
        for size in scaling(study, kind)
        if size.point is not size.reference
    }


def _change(
    before: SizePoint, after: SizePoint, efficiency: tuple[float | None, float | None]
) -> SizeChange:
    rates = throughput(before), throughput(after)
    assert rates[0] is not None
    assert rates[1] is not None
    ratio, is_real = _ratio(before, after)
    state, seconds = _changed_state(before, after)
    return SizeChange(
        before, after, (rates[0], rates[1]), ratio, is_real, efficiency, state, seconds
    )


def _ratio(before: SizePoint, after: SizePoint) -> tuple[Estimate, bool | None]:
    """Return the ratio of the throughputs, and whether it differs from 1 by more than the noise.

    With one run of each, the interval contains an assumed spread between equal runs.
    """
    runs = [[run for run in point.figures if run.throughput > 0] for point in (before, after)]
    groups = [[math.log(run.throughput) for run in group] for group in runs]
    errors = [[relative_error(run) for run in group] for group in runs]
    found = difference_of_runs(groups, errors, [BETWEEN_RUNS, BETWEEN_RUNS])
    value, limit = math.exp(found.after - found.before), found.limit()
    count = min(map(len, groups))
    if limit is None:
        return Estimate(value, 0.0, math.inf, count), None
    return Estimate(value, value * math.exp(-limit), value * math.exp(limit), count), found.real


def _changed_state(before: SizePoint, after: SizePoint) -> tuple[str, float]:
    """Return the state whose time changed most, and the change in s per step of ``before``."""
    samples = after.setup.global_batch / before.setup.global_batch
    changes = {}
    for state in STATES:
        old, new = median_state(before, state), median_state(after, state)
        if old is not None and new is not None:
            changes[state] = new / samples - old
    if not changes:
        return "", 0.0
    most = max(changes, key=lambda state: abs(changes[state]))
    whole = sum(median_state(before, state) or 0.0 for state in STATES)
    if abs(changes[most]) < MIN_STATE_SHARE * whole:
        return "", 0.0
    return most, changes[most]


def _differences(before: ScalingStudy, after: ScalingStudy, changes: list[SizeChange]) -> list[str]:
    both = (before, after)
    texts = {
        "Command": [" ".join([study.request.script, *study.request.args]) for study in both],
        "Options of the runs": [
            " ".join([*study.request.where, *study.request.options]) or "none" for study in both
        ],
        "Knobs": [
            ", ".join(f"{name}={value}" for name, value in sorted(study.request.settings.items()))
            or "none"
            for study in both
        ],
    }
    found = [f"{what}: {a} before, {b} after." for what, (a, b) in texts.items() if a != b]
    hosts = [sorted(_hosts(study)) for study in both]
    if hosts[0] != hosts[1] and all(hosts):
        nodes = [", ".join(names[:4]) + (" ..." if len(names) > 4 else "") for names in hosts]
        found.append(f"Nodes: {nodes[0]} before, {nodes[1]} after.")
    for change in changes:
        batches = change.before.setup.global_batch, change.after.setup.global_batch
        if batches[0] != batches[1]:
            size = f"{counted(change.ranks, 'rank')} ({change.kind} scaling)"
            found.append(f"Global batch on {size}: {batches[0]:,} before, {batches[1]:,} after.")
    return found


def _hosts(study: ScalingStudy) -> set[str]:
    return {
        place.host
        for run in study.runs
        if run.figures is not None
        for place in run.figures.placement
    }
