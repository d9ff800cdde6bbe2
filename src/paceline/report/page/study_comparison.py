"""The page of two scaling studies: before and after a remedy, or two machines."""

from collections.abc import Sequence
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.outcomes.compare_studies import SizeChange, StudyComparison
from ...analyze.scaling.study_model import ScalingStudy
from ..numbers import amount, counted
from ..scaling.size_rows import SizeRow, size_rows
from ..state_names import STATE_NAMES
from ..terminal.scaling.compare_table import (
    SINGLE_RUNS,
    has_single_runs,
    interval_of,
    percent_of,
    verdict_of,
)
from ..terminal.scaling.study_table import SAME
from .study_page import line_of, losses_of
from .write_page import page

LABELS = ("before", "after")


def comparison_page(found: StudyComparison) -> str:
    """Return the page as HTML."""
    studies = (found.before, found.after)
    kinds = list(dict.fromkeys(one.kind for one in found.changes))
    rows = {kind: [_rows(study, kind) for study in studies] for kind in kinds}
    context = {
        "title": "Paceline: two scaling studies",
        "heading": "Two scaling studies",
        "parts": [("summary", "Summary"), ("curves", "Curves"), ("losses", "Losses")],
        "studies": [(label, one.folder) for label, one in zip(LABELS, studies, strict=True)],
        "lead": " ".join(_lead(kind, found.changes) for kind in kinds),
        "changes": [(one, *_told(one)) for one in found.changes],
        "percent_of": percent_of,
        "interval_of": interval_of,
        "kinds": [(kind, SAME[kind]) for kind in kinds],
        "states": [(name, STATE_NAMES[name]) for name in STATES],
        "only": [
            (label, [f"{counted(ranks, 'rank')} ({kind})" for kind, ranks in keys])
            for label, keys in zip(LABELS, (found.only_before, found.only_after), strict=True)
            if keys
        ],
        "differences": found.differences,
        "single": SINGLE_RUNS if has_single_runs(found) else "",
    }
    return page("studies/compare.html", _data(rows), context)


def _rows(study: ScalingStudy, kind: str) -> list[SizeRow]:
    return [row for row in size_rows(study, kind) if row.throughput is not None]


def _lead(kind: str, changes: Sequence[SizeChange]) -> str:
    """Return the change at the largest size of a kind that both studies have."""
    last = max((one for one in changes if one.kind == kind), key=lambda one: one.ranks)
    before, after = (amount(one.value) for one in last.throughput)
    text = f"{kind.capitalize()} scaling, {counted(last.ranks, 'rank')}: {after} samples/s "
    text += f"instead of {before}"
    if last.is_real is None:
        return f"{text}; too few steps to distinguish the change from noise."
    return f"{text} ({percent_of(last.ratio.value)}{'' if last.is_real else ', within the noise'})."


def _told(change: SizeChange) -> tuple[str, str]:
    """Return the verdict on a size, and its kind for the style sheet."""
    if not change.is_real:
        return verdict_of(change), "same"
    return verdict_of(change), "better" if change.ratio.value > 1 else "worse"


def _data(rows: dict[str, list[list[SizeRow]]]) -> dict[str, Any]:
    each = [row for both in rows.values() for one in both for row in one]
    ranks = sorted({row.point.ranks for row in each})
    rate: list[dict[str, Any]] = []
    efficiency: list[dict[str, Any]] = []
    losses: dict[str, dict[str, Any]] = {}
    for kind, both in rows.items():
        merged: list[tuple[int, str, SizeRow]] = []
        for label, one in zip(LABELS, both, strict=True):
            name, number = f"{kind} scaling, {label}", len(rate)
            rate.append(line_of(name, number, one, [row.throughput for row in one]))
            efficiency.append(line_of(name, number, one, [row.efficiency for row in one]))
            merged += [(row.point.ranks, label, row) for row in one]
        merged.sort(key=lambda one: one[0])
        losses[kind] = losses_of([row for _, _, row in merged])
        losses[kind]["names"] = [f"{counted(n, 'rank')}, {label}" for n, label, _ in merged]
    return {
        "states": list(STATES),
        "stateNames": STATE_NAMES,
        "bands": {
            "studyRate": {"ranks": ranks, "lines": rate, "title": "samples/s", "log": True},
            "studyEfficiency": {"ranks": ranks, "lines": efficiency, "title": "scaling efficiency"},
        },
        "losses": losses,
    }
