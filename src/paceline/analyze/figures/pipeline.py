"""Figures of a pipeline: its bubble beside the formula, and the stage that the others wait for."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cost.layout import idle_share
from ...record.ring.states import State
from ..records.read_record import Record, mesh_places
from ..records.state_timeline import Window, total
from .measured_window import MeasuredWindow

STAGE = "stage"  # axis of the mesh
PARTS = (State.FORWARD, State.BACKWARD)
MIN_EXCESS = 0.05  # of the mean, from which on a stage holds up the others


@dataclass(frozen=True)
class PipelineFigures:
    """The pipeline of a run; times in seconds per step.

    Attributes:
        bubble: Share of the bubble in the time in which stages compute or wait for each other.
        formula: The same by the formula of the schedule, for equal stages.
        stage_s: Computing time of each stage, mean of its replicas. On GPUs that of all kernels
            that do not communicate.
        slowest: The stage that computes longest; None if all are about even.
        balance: Modules with which the stages after the first one would begin in a faster
            division; empty if whole modules allow none, or if it was not measured.
    """

    schedule: str
    stages: int
    micro_batches: int
    bubble: float
    formula: float
    stage_s: list[float]
    slowest: int | None
    balance: list[str] = field(default_factory=list)


def measure_pipeline(m: MeasuredWindow) -> PipelineFigures | None:
    """Return the figures of a run's pipeline; None without one."""
    header: Any = next((one for r in m.records if (one := r.meta.get("pipeline"))), None)
    stages = stages_of(m.records)
    if header is None or not stages or not (m.steps and len(m.steps)):
        return None
    spent = [
        # on a GPU, calls return before the computation ends
        rank["useful"] if record.on_gpu else computing_ns(record, m.within)
        for record, rank in zip(m.records, m.states, strict=True)
    ]
    count = header["stages"]
    by_stage = [
        [ns for ns, record in zip(spent, m.records, strict=True) if stages[record.rank] == stage]
        for stage in range(count)
    ]
    if not all(by_stage) or not sum(spent):
        return None
    stage_s = [sum(each) / len(each) / len(m.steps) / 1e9 for each in by_stage]
    waits = sum(rank["bubble"] for rank in m.states)
    longest = int(np.argmax(stage_s))
    is_uneven = stage_s[longest] > (1 + MIN_EXCESS) * sum(stage_s) / count
    schedule, parts = header["schedule"], header["micro_batches"]
    return PipelineFigures(
        schedule,
        count,
        parts,
        bubble=waits / (waits + sum(spent)),
        formula=idle_share(schedule, count, parts),
        stage_s=stage_s,
        slowest=longest if is_uneven else None,
        balance=header.get("balance", []),
    )


def stages_of(records: list[Record]) -> dict[int, int]:
    """Return the stage of each rank; {} without a pipeline."""
    places = mesh_places(records)
    found = {rank: place[STAGE] for rank, place in places.items() if STAGE in place}
    return found if len(found) == len(records) else {}


def micro_batch_events(record: Record, within: Window) -> Any:
    """Return the events of micro-batches in a window; ``seq`` - 1 is the number of each."""
    rows = record.events_in(*PARTS)
    inside = (rows["seq"] > 0) & (rows["end"] > within.start) & (rows["start"] < within.end)
    return rows[inside]


def computing_ns(record: Record, within: Window) -> int:
    """Return the time of a rank in forwards and backwards of micro-batches (ns)."""
    rows = micro_batch_events(record, within)
    start, end = np.maximum(rows["start"], within.start), np.minimum(rows["end"], within.end)
    return total(end - start)
