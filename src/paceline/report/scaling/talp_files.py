"""Runs of a study in the JSON format of DLB's TALP, which TALP-Pages reads.

One file for each run, in a folder for each kind of scaling. The fields are those of DLB 3.5
(``--talp-output-file``). TALP calls the time outside communication useful. Figures are of the
training thread of each rank, so every rank counts as one CPU; hardware counters are 0.
"""

import json
import statistics
from datetime import UTC, datetime
from typing import Any

from ...analyze.scaling.study_model import RunFigures, ScalingStudy, StudyRun
from ...version import __version__

DLB_VERSION = "3.5.0"  # the format that the files follow
REGION = "Global"
NS = 1e9


def talp_files(study: ScalingStudy) -> dict[str, str]:
    """Return the texts of the files by their names relative to the folder, as strong/n4-b64-0.json.

    Raises:
        ValueError: No size was measured.
    """
    files = {}
    for kind in study.request.kinds:
        for point in study.of_kind(kind):
            for run in point.runs:
                if run.figures is not None:
                    name = f"{kind}/{run.setup.name}-{run.repeat}.json"
                    tree = _tree(run, run.figures)
                    files[name] = json.dumps(tree, indent=2, allow_nan=False) + "\n"
    if not files:
        raise ValueError(
            f"{study.folder} has no measured size. HINT: paceline scale --continue {study.folder}"
        )
    return files


def _tree(run: StudyRun, figures: RunFigures) -> dict[str, Any]:
    ranks = run.setup.ranks
    started = datetime.fromtimestamp(run.started, UTC).replace(microsecond=0)
    resources = {"numCpus": ranks, "numNodes": run.hosts, "numMpiRanks": ranks}
    return {
        "producer": f"paceline {__version__}",
        "dlbVersion": DLB_VERSION,
        "timestamp": started.isoformat(),
        "resources": resources,
        "Application": {REGION: _region(ranks, run.hosts, figures)},
    }


def _region(ranks: int, hosts: int, figures: RunFigures) -> dict[str, Any]:
    steps, states = len(figures.step_s), figures.seconds
    blocked_s = states.wait + states.transfer
    busy_s = max(figures.mean_step_s - blocked_s, 0.0)
    inside, outside = _balance(ranks, figures)
    pop = {name: value for name, value in figures.pop.items() if value is not None}
    return {
        "numCpus": ranks,
        "numMpiRanks": ranks,
        "numNodes": hosts,
        "avgCpus": float(ranks),
        "cycles": 0.0,
        "instructions": 0.0,
        "numMeasurements": 1,
        "numMpiCalls": round(steps * sum(one.calls * one.size for one in figures.collectives)),
        "numOmpParallels": 0,
        "numOmpTasks": 0,
        "elapsedTime": round(NS * steps * figures.mean_step_s),
        "usefulTime": round(NS * steps * ranks * busy_s),
        "mpiTime": round(NS * steps * ranks * blocked_s),
        "ompLoadImbalanceTime": 0,
        "ompSchedulingTime": 0,
        "ompSerializationTime": 0,
        "parallelEfficiency": pop.get("parallel", 0.0),
        "mpiParallelEfficiency": pop.get("parallel", 0.0),
        "mpiCommunicationEfficiency": pop.get("communication", 0.0),
        "mpiLoadBalance": pop.get("load_balance", 0.0),
        "mpiLoadBalanceIn": inside,
        "mpiLoadBalanceOut": outside,
        "ompParallelEfficiency": 1.0,
        "ompLoadBalance": 1.0,
        "ompSchedulingEfficiency": 1.0,
        "ompSerializationEfficiency": 1.0,
    }


def _balance(ranks: int, figures: RunFigures) -> tuple[float, float]:
    """Return the load balance within nodes and between nodes; their product is the whole.

    Between: mean of all ranks over that of the node with the most. Within: that over the largest of
    a rank.
    """
    busy = figures.spread.busy_mean_s
    whole = figures.pop.get("load_balance") or 0.0
    if len(busy) != ranks or not max(busy, default=0.0):
        return whole, 1.0
    nodes = [[busy[rank] for rank in _ranks_in(place.ranks, ranks)] for place in figures.placement]
    heaviest = max((statistics.fmean(one) for one in nodes if one), default=statistics.fmean(busy))
    between = min(statistics.fmean(busy) / heaviest, 1.0)
    return min(whole / between, 1.0), between


def _ranks_in(text: str, count: int) -> list[int]:
    """Return the ranks of a text as "0-3,8" that are below ``count``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            found += range(int(first), min(int(last or first) + 1, count))
    return found
