"""The critical batch: sentences and tables for terminal and page, its chart, and JSON."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from ...analyze.scaling.critical.critical_model import LINEAR, BranchRun, StoredCritical
from ...analyze.scaling.critical.judgement import (
    AGREES,
    SMALLER,
    CriticalBatch,
    MultipleResult,
    end_loss,
)
from ...security.text import printable
from .. import document as doc
from ..numbers import amount, counted, finite
from ..sentences import noise_scale_text

FORMAT, VERSION = "paceline-critical-batch-result", 1
POINTS = 64  # of a line; each is the mean of an equal part of the samples


def critical_document(stored: StoredCritical, found: CriticalBatch) -> doc.Document:
    """Return the result: sentences, the losses of each batch, and a chart of them."""
    point, request = found.point, stored.request
    lead, *others = critical_sentences(stored, found)
    where = f"from step {point.step}" if point.step else "from the script's checkpoint"
    about = (
        f"{counted(request.ranks, 'rank')}, {where}, {counted(point.window, 'sample')} a run; mean "
        "loss of the last quarter"
    )
    headings = ("batch", "times", "learning rate", "runs", "loss", "over the base's (95 %)")
    table = doc.Table(
        [*map(doc.Column, headings), doc.Column("", right=False)],
        [doc.Row(_cells(one, request.tolerance)) for one in found.results],
    )
    summary = [doc.Line(lead, doc.LEAD), *map(doc.Line, others)]
    summary += [doc.Line(printable(note), doc.DOUBT) for note in stored.notes]
    chart = doc.Chart(
        "branches",
        "Mean of the seeds, smoothed; bands: lowest and highest seed. All runs continue from the "
        "same checkpoint. The last quarter is compared.",
        lead,
    )
    return doc.Document(
        "Paceline: critical batch",
        f"Critical batch of {request.script}",
        [
            doc.Section("summary", "Summary", summary),
            doc.Section("losses", "Losses", [chart], "Loss after the same samples"),
            doc.Section("batches", "Batches", [table], "Batches"),
        ],
        [doc.Part(" ".join([request.script, *request.args]), "code"), about],
    )


def _cells(one: MultipleResult, tolerance: float) -> list[str | doc.Part]:
    parts = f" in {one.parts} parts" if one.parts > 1 else ""
    verdict = printable(verdict_text(one, tolerance))
    style = {"as good": doc.BETTER, "worse": doc.WORSE}.get(verdict, "")
    return [
        f"{amount(one.batch)}{parts}",
        str(one.multiple),
        f"x {one.rate_factor:.3g}",
        str(one.runs),
        "-" if one.loss is None else f"{one.loss:.4g}",
        difference_text(one),
        doc.Part(verdict, style),
    ]


def critical_charts(stored: StoredCritical, found: CriticalBatch) -> dict[str, Any]:
    """Return the data of the page's chart: a line for each batch."""
    lines = [
        _line(stored.of(one.multiple), number, f"{one.batch:,} samples")
        for number, one in enumerate(found.results)
    ]
    return {"states": [], "branches": [line for line in lines if line is not None]}


def _line(runs: list[BranchRun], number: int, name: str) -> dict[str, Any] | None:
    """Return the loss of a batch over the samples: mean, lowest and highest of the seeds."""
    known = [run for run in runs if len(run.losses) > 1 and None not in run.losses]
    if not known:
        return None
    points = min(POINTS, *(len(run.losses) for run in known))
    end = min(run.samples[-1] for run in known)
    edges = np.linspace(0.0, end, points + 1)
    each = np.array([_means(run, edges) for run in known])
    return {
        "name": name,
        "colour": number,
        "x": edges[1:].tolist(),
        "y": each.mean(axis=0).tolist(),
        "low": each.min(axis=0).tolist(),
        "high": each.max(axis=0).tolist(),
    }


def _means(run: BranchRun, edges: Any) -> list[float]:
    """Return the mean loss between edges; a step counts where it overlaps, by its samples."""
    samples, losses = np.array([0.0, *run.samples]), np.array(run.losses, np.float64)
    sums = np.concatenate([[0.0], np.cumsum(losses * np.diff(samples))])
    whole = np.interp(edges, samples, sums)
    means: list[float] = (np.diff(whole) / np.diff(edges)).tolist()
    return means


def critical_sentences(stored: StoredCritical, found: CriticalBatch) -> list[str]:
    """Return the result in sentences, the most important one first."""
    tolerance = f"{100 * stored.request.tolerance:g} %"
    lines = [_result(found, tolerance), _noise(stored, found)]
    point = found.point
    rule = "linearly with the batch" if point.rule == LINEAR else "with the root of the batch"
    asked = "as asked" if stored.request.rule else f"the rule for {', '.join(point.optimizers)}"
    lines.append(f"The learning rate grew {rule} ({asked}).")
    missing = stored.request.seeds * len(found.results) - sum(one.runs for one in found.results)
    if any(one.runs == 1 for one in found.results[1:]):
        lines.append("With one seed the difference between seeds is not known. HINT: --seeds 3")
    elif missing and not any(one.failure for one in found.results):
        lines.append(
            f"{counted(missing, 'run')} of {stored.request.seeds * len(found.results)} are missing"
            ". HINT: paceline scale --continue DIR"
        )
    return lines


def _result(found: CriticalBatch, tolerance: str) -> str:
    if found.batch is None:
        return (
            "Critical batch: not known, because a batch has no run that can be compared with the "
            "base."
        )
    top = found.results[-1].batch
    if found.is_largest:
        text = (
            f"Critical batch: at least {amount(top)} samples, the largest that was measured. Its "
            f"loss after the same samples is within {tolerance} of the base's"
        )
    elif found.batch == found.point.batch:
        text = (
            f"Critical batch: at most {amount(found.batch)} samples, the base. Twice the batch has "
            f"a loss more than {tolerance} above the base's after the same samples"
        ).replace("Twice", f"{found.results[1].multiple} times")
    else:
        text = (
            f"Critical batch: {amount(found.batch)} samples, {found.batch // found.point.batch} "
            f"times the base. Its loss after the same samples is within {tolerance} of the base's"
        )
    low = amount(found.low) if found.low is not None else "unknown"
    high = f"below {amount(found.high)}" if found.high is not None else "no upper limit"
    return f"{text} (95 % interval between seeds: at least {low}, {high})."


def _noise(stored: StoredCritical, found: CriticalBatch) -> str:
    noise = found.noise
    if noise is None:
        why = (
            "it needs gradients that several ranks exchange. HINT: -n 2"
            if stored.request.ranks == 1
            else "too few steps of the base were sampled. HINT: --steps N with a larger N"
        )
        return f"Gradient noise scale: not measured, because {why}"
    text = noise_scale_text(noise)
    if found.against_noise is None:
        return f"{text[0].upper()}{text[1:]}. The measured critical batch stands alone."
    if found.against_noise == AGREES:
        return f"{text[0].upper()}{text[1:]}. It agrees with the measured critical batch."
    side = "below" if found.against_noise == SMALLER else "above"
    return (
        f"{text[0].upper()}{text[1:]}. It lies {side} the measured critical batch: the measured "
        "one is right for this optimizer and learning rate"
        ". The noise scale assumes plain SGD with its best rate."
    )


def critical_tree(stored: StoredCritical, found: CriticalBatch) -> dict[str, Any]:
    """Return the result as a tree of JSON; numbers that are infinite or unknown are None."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "command": [stored.request.script, *stored.request.args],
        "ranks": stored.request.ranks,
        "tolerance": stored.request.tolerance,
        "base": asdict(found.point),
        "critical_batch": found.batch,
        "low": found.low,
        "high": found.high,
        "is_largest_measured": found.is_largest,
        "multiples": [_row(one, stored.request.tolerance) for one in found.results],
        "noise_scale": asdict(found.noise) if found.noise is not None else None,
        "against_noise_scale": found.against_noise,
        "runs": [
            {
                "multiple": run.multiple,
                "seed": run.seed,
                "loss": finite(end_loss(run, found.point.window)) if run.losses else None,
                "failure": run.failure,
            }
            for run in stored.runs
        ],
        "sentences": critical_sentences(stored, found),
        "notes": stored.notes,
    }


def critical_json(stored: StoredCritical, found: CriticalBatch) -> str:
    """Return the text of ``critical_tree``."""
    return json.dumps(critical_tree(stored, found), indent=1, allow_nan=False) + "\n"


def _row(one: MultipleResult, tolerance: float) -> dict[str, Any]:
    row = {name: finite(value) for name, value in asdict(one).items()}
    return row | {"within": one.is_within(tolerance)}


def difference_text(one: MultipleResult) -> str:
    """Return the difference of the loss with its interval."""
    if one.difference is None:
        return "-"
    if math.isinf(one.difference):
        return "not finite"
    text = f"{100 * one.difference:+.2f} %"
    if one.multiple == 1 or math.isinf(one.high):
        return text
    return f"{text} ({100 * one.low:+.2f} to {100 * one.high:+.2f})"


def verdict_text(one: MultipleResult, tolerance: float) -> str:
    """Return whether a batch is as good as the base, in words."""
    if one.multiple == 1:
        return "the base"
    if one.difference is None:
        return f"failed: {one.failure}" if one.failure else "not measured"
    if one.high <= tolerance:
        return "as good"
    if one.low > tolerance:
        return "worse"
    return "as good, not certain" if one.difference <= tolerance else "worse, not certain"
