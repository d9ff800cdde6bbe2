"""Two scaling studies, before and after a remedy or on two machines: document, charts, JSON."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...analyze.records.state_timeline import STATES
from ...analyze.scaling.outcomes.compare_studies import SizeChange, StudyComparison
from .. import document as doc
from ..figure_names import NOISE, STATE_NAMES
from ..numbers import amount, counted, finite, signed_duration
from .size_rows import SizeRow
from .study_charts import line_of, losses_of, measured_rows
from .study_document import SAME, loss_charts

LABELS = ("before", "after")
SINGLE_RUNS = (
    "Sizes with one run: the interval contains an assumed spread between equal runs. HINT: "
    "paceline scale --continue DIR --minutes N makes further runs"
)


def comparison_document(found: StudyComparison) -> doc.Document:
    """Return the sizes of both studies, with the changes that are larger than the noise."""
    kinds = list(dict.fromkeys(change.kind for change in found.changes))
    lead = " ".join(_lead(kind, found.changes) for kind in kinds)
    blocks: list[doc.Block] = [doc.Line(lead, doc.LEAD)]
    at = itertools.count()
    for kind in kinds:
        changes = (change for change in found.changes if change.kind == kind)
        rows = [_row(change, f"sizes.{next(at)}") for change in changes]
        blocks += [doc.Heading(SAME[kind]), doc.Table(_COLUMNS, rows)]
    for label, keys in zip(LABELS, (found.only_before, found.only_after), strict=True):
        if keys:
            sizes = ", ".join(f"{counted(ranks, 'rank')} ({kind})" for kind, ranks in keys)
            blocks.append(doc.Line(f"Measured only {label}: {sizes}."))
    blocks += [doc.Line(line, doc.DOUBT) for line in found.differences]
    if any(not rate.is_between_runs for change in found.changes for rate in change.throughput):
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


_COLUMNS = doc.columns(
    *("ranks|rank", "samples/s before|samples/s", "after", "change", "95 % interval"),
    *("eff.|scaling efficiency", "after", ""),
    left=0,
)


def _row(change: SizeChange, at: str) -> doc.Row:
    before, after = change.throughput
    style = "" if change.is_real else doc.MUTED
    if change.is_real:
        style = doc.BETTER if change.ratio.value > 1 else doc.WORSE
    cells: list[doc.Text] = [
        doc.Part(str(change.ranks), figure=f"{at}.ranks"),
        doc.Part(amount(before.value), figure=f"{at}.samples_per_s.0"),
        doc.Part(amount(after.value), figure=f"{at}.samples_per_s.1"),
        percent_of(change.ratio.value),
        _interval(change),
        *("-" if value is None else f"{value:.2f}" for value in change.efficiency),
        doc.Part(_verdict(change), style),
    ]
    return doc.Row(cells)


def _lead(kind: str, changes: Sequence[SizeChange]) -> str:
    """Return the change at the largest size of a kind that both studies have."""
    of_kind = [change for change in changes if change.kind == kind]
    last = max(of_kind, key=lambda change: change.ranks)
    before, after = (amount(rate.value) for rate in last.throughput)
    text = f"{kind.capitalize()} scaling, {counted(last.ranks, 'rank')}: {after} samples/s "
    text += f"instead of {before}"
    if last.is_real is None:
        return f"{text}; too few steps to distinguish the change from noise."
    return f"{text} ({percent_of(last.ratio.value)}{'' if last.is_real else ', within the noise'})."


def percent_of(ratio: float) -> str:
    """Return a ratio as a change: +12.0 %."""
    return f"{100 * (ratio - 1):+.1f} %"


def _interval(change: SizeChange) -> str:
    """Return the 95 % interval of a size's change."""
    low, high = change.ratio.low, change.ratio.high
    return f"{percent_of(low)} to {percent_of(high)}" if low > 0 and high < 1e3 else "unknown"


def _verdict(change: SizeChange) -> str:
    """Return whether a size is better or worse, and the state that changed most."""
    if not change.is_real:
        return NOISE[change.is_real]
    text = "better" if change.ratio.value > 1 else "worse"
    if change.state:
        text += f": {STATE_NAMES[change.state]} {signed_duration(change.state_s)} per step"
    return text


def comparison_charts(found: StudyComparison) -> dict[str, Any]:
    """Return the data of the charts of the page."""
    rate: list[dict[str, Any]] = []
    efficiency: list[dict[str, Any]] = []
    losses: dict[str, dict[str, Any]] = {}
    ranks: set[int] = set()
    for kind in dict.fromkeys(change.kind for change in found.changes):
        merged: list[tuple[int, str, SizeRow]] = []
        for label, study in zip(LABELS, (found.before, found.after), strict=True):
            rows = measured_rows(study, kind)
            name, number = f"{kind} scaling, {label}", len(rate)
            rate.append(line_of(name, number, [(row, row.throughput) for row in rows]))
            efficiency.append(line_of(name, number, [(row, row.efficiency) for row in rows]))
            merged += [(row.point.ranks, label, row) for row in rows]
        merged.sort(key=lambda entry: entry[0])
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


def comparison_json(found: StudyComparison) -> dict[str, Any]:
    """Return the comparison as a tree of JSON. Described in formats/scaling.md."""
    return {
        "format": "paceline-scale-comparison",
        "version": 1,
        **{
            label: {"folder": study.folder, "command": [study.request.script, *study.request.args]}
            for label, study in zip(LABELS, (found.before, found.after), strict=True)
        },
        "sizes": [_size(change) for change in found.changes],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "differences": found.differences,
    }


def _size(change: SizeChange) -> dict[str, Any]:
    return {
        "scaling": change.kind,
        "ranks": change.ranks,
        "samples_per_s": [rate.value for rate in change.throughput],
        "ratio": finite(asdict(change.ratio)),
        "real": change.is_real,
        "scaling_efficiency": change.efficiency,
        "state": change.state or None,
        "state_s": change.state_s,
    }
