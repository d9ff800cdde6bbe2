"""The critical batch: sentences and tables for terminal and page, its chart, and JSON."""

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
from ..verdict import capitalized

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
    headings = ("batch", "times", "learning rate", "runs", "loss", "over the base's (95 %)", "")
    table = doc.Table(
        doc.columns(*headings, left=0),
        [doc.Row(_cells(result, request.tolerance)) for result in found.results],
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


def _cells(result: MultipleResult, tolerance: float) -> list[str | doc.Part]:
    parts = f" in {result.parts} parts" if result.parts > 1 else ""
    verdict = printable(verdict_text(result, tolerance))
    style = {"as good": doc.BETTER, "worse": doc.WORSE}.get(verdict, "")
    return [
        f"{amount(result.batch)}{parts}",
        str(result.multiple),
        f"x {result.rate_factor:.3g}",
        str(result.runs),
        "-" if result.loss is None else f"{result.loss:.4g}",
        difference_text(result),
        doc.Part(verdict, style),
    ]


def critical_charts(stored: StoredCritical, found: CriticalBatch) -> dict[str, Any]:
    """Return the data of the page's chart: a line for each batch."""
    lines = [
        _line(stored.of(result.multiple), number, f"{result.batch:,} samples")
        for number, result in enumerate(found.results)
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
    wanted = stored.request.seeds * len(found.results)
    missing = wanted - sum(result.runs for result in found.results)
    if any(result.runs == 1 for result in found.results[1:]):
        lines.append("With one seed the difference between seeds is not known. HINT: --seeds 3")
    elif missing and not any(result.failure for result in found.results):
        lines.append(
            f"{counted(missing, 'run')} of {wanted} are missing. HINT: paceline scale --continue "
            "DIR"
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
            f"Critical batch: at most {amount(found.batch)} samples, the base. "
            f"{found.results[1].multiple} times the batch has a loss more than {tolerance} above "
            "the base's after the same samples"
        )
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
    text = capitalized(noise_scale_text(noise))
    if found.against_noise is None:
        return f"{text}. The measured critical batch stands alone."
    if found.against_noise == AGREES:
        return f"{text}. It agrees with the measured critical batch."
    side = "below" if found.against_noise == SMALLER else "above"
    return (
        f"{text}. It lies {side} the measured critical batch: the measured "
        "one is right for this optimizer and learning rate"
        ". The noise scale assumes plain SGD with its best rate."
    )


def critical_json(stored: StoredCritical, found: CriticalBatch) -> dict[str, Any]:
    """Return the result as a tree of JSON; numbers that are infinite or unknown are None."""
    return {
        "format": "paceline-critical-batch-result",
        "version": 1,
        "command": [stored.request.script, *stored.request.args],
        "ranks": stored.request.ranks,
        "tolerance": stored.request.tolerance,
        "base": asdict(found.point),
        "critical_batch": found.batch,
        "low": found.low,
        "high": found.high,
        "is_largest_measured": found.is_largest,
        "multiples": [_row(result, stored.request.tolerance) for result in found.results],
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


def _row(result: MultipleResult, tolerance: float) -> dict[str, Any]:
    row = {name: finite(value) for name, value in asdict(result).items()}
    return row | {"within": result.is_within(tolerance)}


def difference_text(result: MultipleResult) -> str:
    """Return the difference of the loss with its interval."""
    if result.difference is None:
        return "-"
    if math.isinf(result.difference):
        return "not finite"
    text = f"{100 * result.difference:+.2f} %"
    if result.multiple == 1 or math.isinf(result.high):
        return text
    return f"{text} ({100 * result.low:+.2f} to {100 * result.high:+.2f})"


def verdict_text(result: MultipleResult, tolerance: float) -> str:
    """Return whether a batch is as good as the base, in words."""
    if result.multiple == 1:
        return "the base"
    if result.difference is None:
        return f"failed: {result.failure}" if result.failure else "not measured"
    if result.high <= tolerance:
        return "as good"
    if result.low > tolerance:
        return "worse"
    return "as good, not certain" if result.difference <= tolerance else "worse, not certain"
