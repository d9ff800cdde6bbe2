"""Energy of the measured steps of a run, from the counters of the launcher's node."""

from collections.abc import Sequence

from ...analyze.records.load_run import Run
from ...analyze.records.state_timeline import find_window
from ...analyze.scaling.study_model import EnergyReading, RunFigures
from ...cluster.energy.meter import EnergyMeter
from ...cluster.topology.local_resources import parse_ranges
from ...record.ring.recorder import clock_id

SEVERAL_NODES = (
    "the energy of a run on several nodes is not measured: each node reads only its own counters"
)
OTHER_NODE = (
    "the energy is not measured: the ranks ran on another node than paceline scale, which reads "
    "only its own counters"
)


def measured_energy(
    meter: EnergyMeter, run: Run, figures: RunFigures, hosts: int
) -> tuple[list[EnergyReading], list[str]]:
    """Return the energy of the measured steps, and what could not be read.

    The job is charged for the cores that its ranks may use. A counter that is part of another one
    is left out.
    """
    steps = figures.first_step, figures.first_step + len(figures.step_s)
    window = find_window(run.records, steps) if hosts == 1 else None
    if hosts > 1:
        return [], [SEVERAL_NODES]
    if any(record.meta.get("clock") != clock_id() for record in run.records):
        return [], [OTHER_NODE]
    if window is None:
        return [], meter.notes
    start, end = window.start / 1e9, window.end / 1e9
    readings = [
        EnergyReading(one.source, one.between(start, end), one.is_estimate, one.how)
        for one in meter.charged(_cores(figures))
        if not one.within
    ]
    return readings, meter.notes


def _cores(figures: RunFigures) -> Sequence[int] | None:
    """Return the cores of all ranks; None if they are unknown."""
    found: set[int] = set()
    for one in figures.placement:
        if one.cores is None:
            return None
        found.update(parse_ranges(one.cores))
    return sorted(found) or None
