"""The page of a scaling study: speed-up, losses, costs, fits, and why it bends."""

import math
from collections.abc import Sequence
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.outcomes.batch_advice import batch_advice
from ...analyze.scaling.outcomes.targets import SizeTarget, goal_of, targets
from ...analyze.scaling.study_model import ScalingStudy
from ..numbers import counted
from ..scaling.batch_sentences import batch_sentences
from ..scaling.findings import Curve, Findings
from ..scaling.size_rows import FACTORS, SizeRow, size_rows
from ..scaling.study_json import study_tree
from ..scaling.target_sentences import target_sentences
from ..state_names import STATE_NAMES
from ..terminal.comparison import NAMES
from ..terminal.scaling.study_table import SAME, failures, fit_sentence, prediction_sentence
from .comparison import definition_key
from .write_page import page

MAX_SHARE = 10.0  # of an interval's end to its value: beyond, the interval is not drawn


def study_page(study: ScalingStudy, findings: Findings) -> str:
    """Return the page as HTML.

    Raises:
        ValueError: No size was measured.
    """
    kinds = [_Kind(study, kind, findings.of_kind(kind)) for kind in study.request.kinds]
    kinds = [kind for kind in kinds if kind.measured]
    if not kinds:
        raise ValueError(
            f"{study.folder} has no measured size. HINT: paceline scale --continue {study.folder}"
        )
    tree = study_tree(study, findings)
    parts = [("summary", "Summary"), ("curves", "Curves"), ("losses", "Losses")]
    parts += [("costs", "Costs"), ("figures", "Figures"), ("fits", "Fits"), ("runs", "Runs")]
    context = {
        "title": f"Paceline: scaling of {study.name}",
        "heading": f"Scaling of {study.name}",
        "parts": parts,
        "command": " ".join(tree["command"]),
        "batch": study.batch.text if study.batch is not None else "",
        "lead": " ".join(kind.lead for kind in kinds),
        "kinds": kinds,
        "goal": goal_of(study),
        "sizes": tree["sizes"],
        "factors": [(name, NAMES[name].strip(), definition_key(name)) for name in FACTORS],
        "states": [(name, STATE_NAMES[name]) for name in STATES],
        "fits": [fit_sentence(one) for one in findings.fits],
        "parameters": [
            {"at": at, "kind": one.kind, "model": one.model, "parameters": one.parameters}
            for at, one in enumerate(findings.fits)
            if one.parameters
        ],
        "predictions": [prediction_sentence(one) for one in findings.predictions],
        "notes": study.notes,
        "energy_notes": _energy_notes(study),
    }
    return page("studies/study.html", _data(kinds), context)


class _Kind:
    """One kind of scaling, as the page shows it.

    Attributes:
        measured: The rows with figures.
        lead: Its result in one or two sentences.
    """

    def __init__(self, study: ScalingStudy, name: str, findings: Findings) -> None:
        self.name, self.findings = name, findings
        self.title = SAME[name]
        self.rows = size_rows(study, name)
        self.measured = [row for row in self.rows if row.throughput is not None]
        self.failures = failures(self.rows)
        self.targets = targets(study, name)
        goal = goal_of(study)
        self.target_sentences = target_sentences(self.targets, goal) if goal else []
        self.target_sentences += batch_sentences(batch_advice(study, name))
        self.reasons = findings.reasons
        self.knees = [one.text for one in findings.knees]
        self.lead = _lead(name, self.measured) if self.measured else ""


def _lead(kind: str, rows: Sequence[SizeRow]) -> str:
    first, last = rows[0], rows[-1]
    if last is first or last.speedup is None or last.efficiency is None:
        only = counted(first.point.ranks, "rank")
        return f"{kind.capitalize()} scaling: only {only} could be measured."
    return (
        f"{kind.capitalize()} scaling: {counted(last.point.ranks, 'rank')} train "
        f"{last.speedup.value:.2f} times as many samples/s as "
        f"{counted(first.point.ranks, 'rank')}, an efficiency of {last.efficiency.value:.2f}."
    )


def _data(kinds: Sequence[_Kind]) -> dict[str, Any]:
    ranks = sorted({row.point.ranks for kind in kinds for row in kind.measured})
    ideal = [ranks[0], max(ranks)]
    speedup = [{"name": "ideal", "x": ideal, "y": [n / ranks[0] for n in ideal], "ideal": True}]
    efficiency = [{"name": "ideal", "x": ideal, "y": [1.0, 1.0], "ideal": True}]
    time, cost = [], []
    for number, kind in enumerate(kinds):
        name, rows = f"{kind.name} scaling", kind.measured
        speedup.append(line_of(name, number, rows, [row.speedup for row in rows]))
        efficiency.append(line_of(name, number, rows, [row.efficiency for row in rows]))
        first = rows[0]
        assert first.throughput is not None
        base = first.throughput.value
        for curve in kind.findings.curves:
            each = base / first.point.ranks
            speedup.append(_fitted(curve, number, base, per_rank=False))
            efficiency.append(_fitted(curve, number, each, per_rank=True))
        times, hours = _costs(kind)
        time.append(line_of(name, number, [one for one, _ in times], [two for _, two in times]))
        cost.append(line_of(name, number, [one for one, _ in hours], [two for _, two in hours]))
    return {
        "states": list(STATES),
        "stateNames": STATE_NAMES,
        "bands": {
            "studySpeedup": {"ranks": ranks, "lines": speedup, "title": "speed-up", "log": True},
            "studyEfficiency": {"ranks": ranks, "lines": efficiency, "title": "scaling efficiency"},
            "studyTime": {"ranks": ranks, "lines": time, "title": "time (s)", "log": True},
            "studyCost": {"ranks": ranks, "lines": cost, "title": "node-hours", "log": True},
        },
        "losses": {kind.name: losses_of(kind.measured) for kind in kinds},
    }


def line_of(
    name: str, number: int, rows: Sequence[SizeRow], found: Sequence[Estimate | None]
) -> dict[str, Any]:
    """Return a line of a chart. number: Of its colour. found: Value of each row."""
    known = [(row, one) for row, one in zip(rows, found, strict=True) if one is not None]
    drawn = [one if one.low > 0 and one.high < MAX_SHARE * one.value else None for _, one in known]
    return {
        "name": name,
        "colour": number,
        "x": [row.point.ranks for row, _ in known],
        "y": [one.value for _, one in known],
        "above": [one.high - one.value if one else 0.0 for one in drawn],
        "below": [one.value - one.low if one else 0.0 for one in drawn],
    }


def _fitted(curve: Curve, number: int, base: float, per_rank: bool) -> dict[str, Any]:
    """Return a fitted curve in multiples of ``base`` samples/s (of a rank)."""
    low, middle, high = (
        [x / base / (n if per_rank else 1) for x, n in zip(values, curve.ranks, strict=True)]
        for values in (curve.low, curve.values, curve.high)
    )
    high = [min(end, MAX_SHARE * x) for end, x in zip(high, middle, strict=True)]
    found = [low, middle, high]
    if not all(math.isfinite(x) for values in found for x in values):
        found = [middle, middle, middle]
    name = f"{curve.kind} scaling, {curve.model}"
    return {
        "name": name,
        "colour": number,
        "x": curve.ranks,
        "low": found[0],
        "y": found[1],
        "high": found[2],
        "fitted": True,
    }


def losses_of(rows: Sequence[SizeRow]) -> dict[str, Any]:
    """Return the seconds per step and rank in each state, by size."""
    return {
        "ranks": [row.point.ranks for row in rows],
        "seconds": {state: [row.states.get(state, 0.0) for row in rows] for state in STATES},
    }


def _costs(
    kind: _Kind,
) -> tuple[list[tuple[SizeRow, Estimate | None]], list[tuple[SizeRow, Estimate | None]]]:
    """Return time and node-hours to the target, or for a million samples without one."""
    ends: dict[Any, SizeTarget] = {one.point.setup: one for one in kind.targets}
    if ends:
        both = [(row, ends.get(row.point.setup)) for row in kind.measured]
        return (
            [(row, one.seconds if one is not None else None) for row, one in both],
            [(row, one.node_hours if one is not None else None) for row, one in both],
        )
    one = Estimate(1e6, 1e6, 1e6, 2)
    seconds = [(row, one.over(row.throughput)) for row in kind.measured if row.throughput]
    return (
        [(row, found) for row, found in seconds],
        [(row, found.times(row.point.hosts / 3600)) for row, found in seconds],
    )


def _energy_notes(study: ScalingStudy) -> list[str]:
    """Return how energy was read and charged, or why it could not be read; each text once."""
    found: dict[str, None] = {}
    for run in study.runs:
        if run.figures is not None:
            for reading in run.figures.energy:
                kind = "estimate" if reading.is_estimate else "measured"
                found[f"{reading.source} ({kind}): {reading.how}"] = None
            for note in run.figures.energy_notes:
                found[note] = None
    return list(found)
