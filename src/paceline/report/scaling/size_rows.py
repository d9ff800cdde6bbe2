"""The figures of each size of a study, which all outputs show."""

import statistics
from dataclasses import dataclass

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import (
    Estimate,
    Scaling,
    median_factor,
    median_state,
    scaling,
    step_time,
    throughput,
)
from ...analyze.scaling.study_model import RunFigures, ScalingStudy, SizePoint
from ..figure_names import EFFICIENCIES

MILLION = 1e6


@dataclass(frozen=True)
class Energy:
    """Energy of one sample.

    Attributes:
        joules: J per sample, median of the runs.
        is_estimate: Whether it is a share of counters that cover more than the job.
        sources: Names of the counters.
    """

    joules: float
    is_estimate: bool
    sources: tuple[str, ...]


@dataclass(frozen=True)
class SizeRow:
    """One size of one kind of scaling; figures are None if it has no run.

    Attributes:
        pop: POP factors by name (``EFFICIENCIES``), median of the runs.
        states: Seconds per step and rank by state; they add up to ``step`` except for medians.
        memory_bytes: Largest resident memory of a rank in any run.
        device_bytes: Largest memory of a device.
        node_hours_per_million: Nodes times hours for a million samples.
    """

    point: SizePoint
    step: Estimate | None
    throughput: Estimate | None
    speedup: Estimate | None
    efficiency: Estimate | None
    computation: float | None
    global_efficiency: float | None
    pop: dict[str, float | None]
    states: dict[str, float]
    memory_bytes: int | None
    device_bytes: int | None
    energy: Energy | None
    node_hours_per_million: float | None


def size_rows(study: ScalingStudy, kind: str) -> list[SizeRow]:
    """Return a row for every size of a kind, by ascending ranks, also for those without figures."""
    measured = {scaled.point.setup: scaled for scaled in scaling(study, kind)}
    return [_row(point, measured.get(point.setup)) for point in study.of_kind(kind)]


def unmeasured(study: ScalingStudy) -> ValueError:
    """Return the error for an output that needs a measured size."""
    return ValueError(
        f"{study.folder} has no measured size. HINT: paceline scale --continue {study.folder}"
    )


def _row(point: SizePoint, scaled: Scaling | None) -> SizeRow:
    rate = throughput(point)
    seconds = {state: median_state(point, state) for state in STATES}
    hours = point.hosts * MILLION / rate.value / 3600 if rate is not None else None
    return SizeRow(
        point,
        step_time(point),
        rate,
        scaled.speedup if scaled is not None else None,
        scaled.efficiency if scaled is not None else None,
        scaled.computation if scaled is not None else None,
        scaled.global_efficiency if scaled is not None else None,
        {name: median_factor(point, name) for name in EFFICIENCIES},
        {state: value for state, value in seconds.items() if value is not None},
        max((n for run in point.figures for n in run.memory_bytes), default=None),
        max((n for run in point.figures for n in run.device_bytes), default=None),
        energy_of(point),
        hours,
    )


def energy_of(point: SizePoint) -> Energy | None:
    """Return the energy of a sample; None if no run could read it.

    A counter of the whole node contains those of its parts, so it is used alone.
    """
    found = [energy for figures in point.figures if (energy := _energy_of_run(figures)) is not None]
    if not found:
        return None
    joules = statistics.median(energy.joules for energy in found)
    return Energy(joules, any(energy.is_estimate for energy in found), found[0].sources)


def _energy_of_run(figures: RunFigures) -> Energy | None:
    samples = figures.samples_per_step * len(figures.step_s)
    readings = [reading for reading in figures.energy if reading.source == "node"] or figures.energy
    if not readings or not samples:
        return None
    return Energy(
        sum(reading.joules for reading in readings) / samples,
        any(reading.is_estimate for reading in readings),
        tuple(sorted({reading.source for reading in readings})),
    )
