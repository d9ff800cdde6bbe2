"""The page of a measurement of the critical batch."""

from typing import Any

import numpy as np

from ...analyze.scaling.critical.critical_model import BranchRun, StoredCritical
from ...analyze.scaling.critical.judgement import CriticalBatch
from ..scaling.critical_report import critical_sentences, difference_text, verdict_text
from .write_page import page

POINTS = 64  # of a line; each is the mean of an equal part of the samples


def critical_page(stored: StoredCritical, found: CriticalBatch) -> str:
    """Return the page as HTML."""
    lead, *others = critical_sentences(stored, found)
    tolerance = stored.request.tolerance
    context = {
        "title": f"Paceline: critical batch of {stored.request.script}",
        "heading": f"Critical batch of {stored.request.script}",
        "parts": [("summary", "Summary"), ("losses", "Losses"), ("batches", "Batches")],
        "command": " ".join([stored.request.script, *stored.request.args]),
        "lead": lead,
        "others": [*others, *stored.notes],
        "rows": [
            (one, difference_text(one), verdict_text(one, tolerance)) for one in found.results
        ],
    }
    lines = [
        line
        for number, one in enumerate(found.results)
        if (line := _line(stored.of(one.multiple), number, f"{one.batch:,} samples"))
    ]
    return page("studies/critical_batch.html", {"states": [], "branches": lines}, context)


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
