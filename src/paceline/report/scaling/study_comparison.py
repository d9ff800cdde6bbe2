"""Two scaling studies, before and after a remedy or on two machines: document, charts, JSON."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.outcomes.compare_studies import SizeChange, StudyComparison
from ...analyze.scaling.study_model import ScalingStudy
from .. import document as doc
from ..numbers import amount, counted, signed_duration
from ..state_names import STATE_NAMES
from .size_rows import SizeRow
from .study_charts import line_of, losses_of, measured_rows
from .study_document import SAME, loss_charts

FORMAT, VERSION = "paceline-scale-comparison", 1
LABELS = ("before", "after")
SINGLE_RUNS = (
    "Sizes with one run: the interval contains an assumed spread between equal runs. HINT: "
    "paceline scale --continue DIR --minutes N makes further runs"
)


def comparison_document(found: StudyComparison) -> doc.Document:
    """Return the sizes of both studies, with the changes that are larger than the noise."""
    kinds = list(dict.fromkeys(one.kind for one in found.changes))
    lead = " ".join(_lead(kind, found.changes) for kind in kinds)
    blocks: list[doc.Block] = [doc.Line(lead, doc.LEAD)]
    at = itertools.count()
    for kind in kinds:
        rows = [_row(one, f"sizes.{next(at)}") for one in found.changes if one.kind == kind]
        blocks += [doc.Heading(SAME[kind]), doc.Table(_COLUMNS, rows)]
    for label, keys in zip(LABELS, (found.only_before, found.only_after), strict=True):
        if keys:
            sizes = ", ".join(f"{counted(ranks, 'rank')} ({kind})" for kind, ranks in keys)
            blocks.append(doc.Line(f"Measured only {label}: {sizes}."))
    blocks += [doc.Line(line, doc.DOUBT) for line in found.differences]
    if any(not rate.is_between_runs for one in found.changes for rate in one.throughput):
        blocks.append(doc.Line(SINGLE_RUNS, doc.MUTED))
    of_first = "Relative to the smallest size of each study."
    curves = doc.Charts(
        [
            doc.Chart("studyRate", "Bars: 90 % confidence intervals.", lead),
            doc.Chart("studyEfficiency", of_first, "Scaling efficiency of both studies"),
        ]
    )
    return doc.Document(
        "Paceline: two scaling studies",
        "Two scaling studies",
        [
            doc.Section("summary", "Summary", blocks),
            doc.Section("curves", "Curves", [curves], "Throughput and efficiency", doc.PAGE),
            doc.Section(
                "losses", "Losses", loss_charts(kinds), "Time per step, by state", doc.PAGE
            ),
        ],
        [f"before: {found.before.folder}", f"after:  {found.after.folder}"],
    )


_COLUMNS = (
    doc.Column("ranks", term="rank"),
    doc.Column("samples/s before", term="samples/s"),
    doc.Column("after"),
    doc.Column("change"),
    doc.Column("95 % interval"),
    doc.Column("eff.", term="scaling efficiency"),
    doc.Column("after"),
    doc.Column("", right=False),
)


def _row(one: SizeChange, at: str) -> doc.Row:
    before, after = one.throughput
    style = "" if one.is_real else doc.MUTED
    if one.is_real:
        style = doc.BETTER if one.ratio.value > 1 else doc.WORSE
    cells: list[doc.Text] = [
        doc.Part(str(one.ranks), figure=f"{at}.ranks"),
        doc.Part(amount(before.value), figure=f"{at}.samples_per_s.0"),
        doc.Part(amount(after.value), figure=f"{at}.samples_per_s.1"),
        percent_of(one.ratio.value),
        _interval(one),
        *("-" if value is None else f"{value:.2f}" for value in one.efficiency),
        doc.Part(_verdict(one), style),
    ]
    return doc.Row(cells)


def _lead(kind: str, changes: Sequence[SizeChange]) -> str:
    """Return the change at the largest size of a kind that both studies have."""
    last = max((one for one in changes if one.kind == kind), key=lambda one: one.ranks)
    before, after = (amount(one.value) for one in last.throughput)
    text = f"{kind.capitalize()} scaling, {counted(last.ranks, 'rank')}: {after} samples/s "
    text += f"instead of {before}"
    if last.is_real is None:
        return f"{text}; too few steps to distinguish the change from noise."
    return f"{text} ({percent_of(last.ratio.value)}{'' if last.is_real else ', within the noise'})."


def percent_of(ratio: float) -> str:
    """Return a ratio as a change: +12.0 %."""
    return f"{100 * (ratio - 1):+.1f} %"


def _interval(one: SizeChange) -> str:
    """Return the 95 % interval of a size's change."""
    low, high = one.ratio.low, one.ratio.high
    return f"{percent_of(low)} to {percent_of(high)}" if low > 0 and high < 1e3 else "unknown"


def _verdict(one: SizeChange) -> str:
    """Return whether a size is better or worse, and the state that changed most."""
    if one.is_real is None:
        return "too few steps to distinguish it from noise"
    if not one.is_real:
        return "within the noise"
    text = "better" if one.ratio.value > 1 else "worse"
    if one.state:
        text += f": {STATE_NAMES[one.state]} {signed_duration(one.state_s)} per step"
    return text


def comparison_charts(found: StudyComparison) -> dict[str, Any]:
    """Return the data of the charts of the page."""
    rate: list[dict[str, Any]] = []
    efficiency: list[dict[str, Any]] = []
    losses: dict[str, dict[str, Any]] = {}
    ranks: set[int] = set()
    for kind in dict.fromkeys(one.kind for one in found.changes):
        merged: list[tuple[int, str, SizeRow]] = []
        for label, study in zip(LABELS, (found.before, found.after), strict=True):
            rows = measured_rows(study, kind)
            name, number = f"{kind} scaling, {label}", len(rate)
            rate.append(line_of(name, number, [(row, row.throughput) for row in rows]))
            efficiency.append(line_of(name, number, [(row, row.efficiency) for row in rows]))
            merged += [(row.point.ranks, label, row) for row in rows]
        merged.sort(key=lambda one: one[0])
        ranks |= {n for n, _, _ in merged}
        losses[kind] = losses_of([row for _, _, row in merged])
        losses[kind]["names"] = [f"{counted(n, 'rank')}, {label}" for n, label, _ in merged]
    sizes = sorted(ranks)
    return {
        "states": list(STATES),
        "stateNames": STATE_NAMES,
        "bands": {
            "studyRate": {"ranks": sizes, "lines": rate, "title": "samples/s", "log": True},
            "studyEfficiency": {"ranks": sizes, "lines": efficiency, "title": "scaling efficiency"},
        },
        "losses": losses,
    }


def comparison_json(found: StudyComparison) -> str:
    """Return the comparison as JSON. Described in formats/scaling.md."""
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
