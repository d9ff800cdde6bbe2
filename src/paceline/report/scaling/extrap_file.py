"""Runs of a study as an input file of Extra-P, which fits models to them.

The format is documented by Extra-P (docs/file-formats.md): the newer of its two JSON formats, and
JSON Lines. The only parameter is the number of ranks ``p``. The call path "strong->step" is the
mean time of a step, "strong->step->wait" the part that a rank waits, and so on, in seconds.
"""

import json
from pathlib import Path
from typing import Any

from ...analyze.scaling.study_model import RunFigures, ScalingStudy
from .csv_file import STATE_COLUMNS

PARAMETER, TIME, RATE = "p", "time", "samples_per_s"


def extrap_text(study: ScalingStudy, path: Path) -> str:
    """Return the file's text: JSON Lines if the name ends in .jsonl, otherwise JSON.

    Raises:
        ValueError: No size was measured.
    """
    found = _measurements(study)
    if not found:
        raise ValueError(
            f"{study.folder} has no measured size, which Extra-P needs. HINT: paceline scale "
            f"--continue {study.folder}"
        )
    if path.suffix == ".jsonl":
        lines = [
            {"params": {PARAMETER: ranks}, "callpath": callpath, "metric": metric, "value": values}
            for (callpath, metric), points in found.items()
            for ranks, values in points.items()
        ]
        return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    tree: dict[str, Any] = {}
    for (callpath, metric), points in found.items():
        rows = [{"point": [ranks], "values": values} for ranks, values in points.items()]
        tree.setdefault(callpath, {})[metric] = rows
    return json.dumps({"parameters": [PARAMETER], "measurements": tree}, allow_nan=False) + "\n"


def _measurements(study: ScalingStudy) -> dict[tuple[str, str], dict[int, list[float]]]:
    """Return the values of the runs by call path and metric, and by number of ranks.

    States in which no run spends time are left out: a model of zeros says nothing.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for kind in study.request.kinds:
        for point in study.of_kind(kind):
            for figures in point.figures:
                for (path, metric), value in _values(figures).items():
                    points = found.setdefault((f"{kind}->{path}", metric), {})
                    points.setdefault(point.ranks, []).append(value)
    return {key: points for key, points in found.items() if any(map(any, points.values()))}


def _values(figures: RunFigures) -> dict[tuple[str, str], float]:
    values = {("step", TIME): figures.mean_step_s, ("step", RATE): figures.throughput}
    for state in STATE_COLUMNS:
        values[f"step->{state}", TIME] = float(getattr(figures.seconds, state))
    return values
