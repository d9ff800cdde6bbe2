"""A comparison of two studies as JSON. Described in formats/scaling.md."""

import json
from dataclasses import asdict
from typing import Any

from ...analyze.scaling.outcomes.compare_studies import SizeChange, StudyComparison
from ...analyze.scaling.study_model import ScalingStudy

FORMAT, VERSION = "paceline-scale-comparison", 1


def comparison_json(found: StudyComparison) -> str:
    """Return the text of the JSON."""
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "before": _about(found.before),
        "after": _about(found.after),
        "sizes": [_size(one) for one in found.changes],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "differences": found.differences,
    }
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def _about(study: ScalingStudy) -> dict[str, Any]:
    return {
        "folder": study.folder,
        "command": [study.request.script, *study.request.args],
    }


def _size(one: SizeChange) -> dict[str, Any]:
    return {
        "scaling": one.kind,
        "ranks": one.ranks,
        "samples_per_s": [rate.value for rate in one.throughput],
        "ratio": {
            name: value if value < float("inf") else None
            for name, value in asdict(one.ratio).items()
        },
        "real": one.is_real,
        "scaling_efficiency": one.efficiency,
        "state": one.state or None,
        "state_s": one.state_s,
    }
