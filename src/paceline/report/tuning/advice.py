"""Sentences about what the summaries of trials tell: what to change in the study."""

from collections.abc import Sequence

from ..numbers import counted, percent
from .tuning_view import TrialRow

_WAITING = {
    "input": (
        "the next batch",
        "paceline tune --pack SOURCE --stage DATASET packs and stages the input once for all "
        "trials, or a faster loader: paceline diagnose with the command of this trial",
    ),
    "exchange": (
        "other ranks and the exchange between them",
        "fewer ranks for each trial: study.ranks; or paceline diagnose with the command of this "
        "trial",
    ),
    "cores": (
        "a core",
        "study.cores = more, or fewer threads: trials share the cores of the node",
    ),
}


def wait_notes(rows: Sequence[TrialRow]) -> list[str]:
    """Return a note for each kind of wait that takes a part of trials' time."""
    notes = []
    for kind, (what, hint) in _WAITING.items():
        found = [row for row in rows if row.waits_for == kind]
        if not found:
            continue
        most = max(found, key=lambda row: row.waits)
        notes.append(
            f"{counted(len(found), 'trial')} waited for {what}, trial {most.number} longest: "
            f"{percent(most.waits)} of its ranks' time. HINT: {hint}"
        )
    return notes


def batch_notes(rows: Sequence[TrialRow]) -> list[str]:
    """Return a note with the bounds of the batch that the gradient noise scale gives."""
    found = [row for row in rows if row.noise]
    if not found:
        return []
    best = min(found, key=lambda row: row.noise[2] / max(row.noise[1], 1e-9))
    samples, low, high = best.noise
    return [
        f"the gradient noise scale of trial {best.number} is {samples:,.0f} samples ({low:,.0f} to "
        f"{high:,.0f}). A global batch far below it needs more steps in proportion, one far above "
        "it gains little. HINT: choose the range of the batch around it"
    ]
