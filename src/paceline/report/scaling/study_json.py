"""A scaling study as JSON: ``paceline scale --json``. Described in formats/scaling.md."""

import json
from dataclasses import asdict
from typing import Any

from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.batch_advice import batch_advice
from ...analyze.scaling.outcomes.targets import (
    SizeTarget,
    cheapest,
    goal_of,
    learning_rate_rule,
    soonest,
    targets,
)
from ...analyze.scaling.study_model import ScalingStudy
from ..numbers import finite
from .findings import Findings
from .size_rows import SizeRow, size_rows

FORMAT, VERSION = "paceline-scale", 1


def study_tree(study: ScalingStudy, findings: Findings) -> dict[str, Any]:
    """Return the study as a tree of JSON; numbers that are infinite or unknown are None."""
    sizes = []
    for kind in study.request.kinds:
        ends = {one.point.setup: one for one in targets(study, kind)}
        sizes += [_size(row, ends.get(row.point.setup)) for row in size_rows(study, kind)]
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "folder": study.folder,
        "command": [study.request.script, *study.request.args],
        "batch": asdict(study.batch) if study.batch is not None else None,
        "efficiency": study.request.efficiency,
        "sizes": sizes,
        "knees": [asdict(one) for one in findings.knees],
        "reasons": [asdict(one) for one in findings.reasons],
        "fits": [asdict(one) for one in findings.fits],
        "curves": [asdict(one) for one in findings.curves],
        "predictions": [
            {
                **asdict(one.prediction),
                "high": one.high,
                "measured": one.measured.value if one.measured is not None else None,
                "error": one.error,
                "inside": one.is_inside,
            }
            for one in findings.predictions
        ],
        "target": _target(study),
        "larger_batches": {
            kind: asdict(advice)
            for kind in study.request.kinds
            if (advice := batch_advice(study, kind)) is not None
        },
        "notes": study.notes,
    }
    found: dict[str, Any] = finite(tree)
    return found


def study_json(study: ScalingStudy, findings: Findings) -> str:
    """Return the text of ``study_tree``."""
    return json.dumps(study_tree(study, findings), indent=1, allow_nan=False) + "\n"


def _size(row: SizeRow, end: SizeTarget | None) -> dict[str, Any]:
    point = row.point
    return {
        "scaling": point.kind,
        "ranks": point.ranks,
        "nodes": point.hosts,
        "layout": point.layout or None,
        "global_batch": point.setup.global_batch,
        "rank_batch": point.setup.rank_batch,
        "runs": len(point.runs),
        "failed_runs": point.failed_runs,
        "failure": point.failure,
        "step_s": _estimate(row.step),
        "samples_per_s": _estimate(row.throughput),
        "speedup": _estimate(row.speedup),
        "scaling_efficiency": _estimate(row.efficiency),
        "computation_scalability": row.computation,
        "global_efficiency": row.global_efficiency,
        "pop": row.pop,
        "states_s": row.states,
        "memory_bytes": row.memory_bytes,
        "device_bytes": row.device_bytes,
        "energy": asdict(row.energy) if row.energy is not None else None,
        "node_hours_per_million_samples": row.node_hours_per_million,
        "target": _size_target(end) if end is not None else None,
        "placement": [asdict(place) for run in point.figures[:1] for place in run.placement],
    }


def _size_target(end: SizeTarget) -> dict[str, Any]:
    return {
        "seeds": end.seeds,
        "reached": end.reached,
        "samples": _estimate(end.samples),
        "statistical_efficiency": _estimate(end.statistical_efficiency),
        "seconds": _estimate(end.seconds),
        "node_hours": _estimate(end.node_hours),
        "best": end.best,
        "learning_rate": end.learning_rate,
        "predicted_efficiency": end.predicted_efficiency,
    }


def _target(study: ScalingStudy) -> dict[str, Any] | None:
    goal = goal_of(study)
    if goal is None:
        return None
    found = {}
    for kind in study.request.kinds:
        sizes = targets(study, kind)
        first, cheap = soonest(sizes), cheapest(sizes)
        found[kind] = {
            "soonest_ranks": first.point.ranks if first is not None else None,
            "cheapest_ranks": cheap.point.ranks if cheap is not None else None,
            "learning_rate_rule": learning_rate_rule(sizes),
        }
    return {"goal": str(goal), **found}


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    return asdict(found) if found is not None else None
