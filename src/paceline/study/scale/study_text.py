"""A scaling study as plain text: one line a size."""

import math

from ...analyze.scaling.derived import Estimate, Scaling, scaling
from ...analyze.scaling.study_model import STRONG, WEAK, ScalingStudy, SizePoint

HEAD = (
    "ranks",
    "hosts",
    "batch",
    "runs",
    "samples/s",
    "±",
    "speed-up",
    "efficiency",
    "±",
    "useful",
)


def study_text(study: ScalingStudy) -> str:
    """Return the sizes of a study with throughput, speed-up and efficiency, and the notes."""
    lines = []
    for kind, what in ((STRONG, "same global batch"), (WEAK, "same batch per rank")):
        points = study.of_kind(kind)
        if points:
            known = {one.point.ranks: one for one in scaling(study, kind)}
            rows = [_row(point, known.get(point.ranks)) for point in points]
            lines += [f"{kind} scaling ({what})", *_aligned([HEAD, *rows]), ""]
    if study.batch is not None and study.batch.text:
        lines.append(f"batch: {study.batch.text}")
    lines += [f"note: {note}" for note in study.notes]
    return "\n".join(lines).rstrip()


def _row(point: SizePoint, known: Scaling | None) -> tuple[str, ...]:
    setup = f"{point.ranks}", f"{point.hosts}", f"{point.setup.global_batch}", f"{len(point.runs)}"
    if known is None:
        return *setup, f"failed: {point.failure}" if point.failure else "not measured"
    return (
        *setup,
        f"{known.throughput.value:,.1f}",
        _relative(known.throughput),
        f"{known.speedup.value:.2f}",
        f"{100 * known.efficiency.value:.0f} %",
        "" if known.point is known.reference else _relative(known.efficiency),
        "" if known.global_efficiency is None else f"{100 * known.global_efficiency:.0f} %",
        *([f"one run of {point.failed_runs} failed"] if point.failed_runs else []),
    )


def _relative(one: Estimate) -> str:
    return "?" if math.isinf(one.precision) else f"{100 * one.precision:.1f} %"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows with right-aligned columns; a last column without a head is left-aligned."""
    count = len(HEAD)
    widths = [max(len(row[i]) for row in rows if len(row) >= count) for i in range(count)]
    lines = []
    for row in rows:
        full = len(row) >= count
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        if not full:
            cells[-1] = row[-1]
        lines.append("  " + "  ".join([*cells, *row[count:]]).rstrip())
    return lines
