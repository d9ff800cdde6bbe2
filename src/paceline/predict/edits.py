"""Predict the saving of an edit of a line of the script, and describe the edit."""

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.ladder import Interval
from .saving import RECORD, Saving


def edit_line(e: Evidence, cause: Cause) -> Saving | None:
    """Propose an edit of the cause's line, and predict that between nothing and all of its share
    is saved.
    """
    lines = cause.evidence.get("lines")
    if cause.id == "slow-rank" and not lines:
        return None
    doing = ONE_RANK if cause.id == "slow-rank" else str(cause.evidence.get("doing"))
    place = f" (in {str(lines[0]['file']).rpartition('/')[2]})" if lines else ""
    edit = f"execute the line {LINE_EDITS.get(doing, LINE_EDITS['library'])}{place}"
    if doing in REPLACED:
        edit = f"use {LINE_EDITS[doing]}{place}"
    return Saving(edit, Interval(cause.share / 2, 0.0, cause.share), RECORD)


ONE_RANK = "one rank"
# By what a line does: how to change it.
LINE_EDITS = {
    "python": "operators on whole tensors in place of a Python loop, or once before the training",
    "short calls": "one operator on the whole batch in place of many small ones, or torch.compile",
    "library": "in the loader's workers, once before the training, or every N steps",
    "file": "once and keep what it reads in memory, in the loader's workers, or every N steps",
    "wait": "every N steps, or in a thread whose result the next step uses",
    "garbage collection": "fewer Python objects, or gc.freeze() after the first step",
    ONE_RANK: "every N steps, or a part of it on each rank, or in a thread",
}
REPLACED = ("python", "short calls", "garbage collection")  # edits that replace the line


# By what other work of a script does: where it can be done instead. Python code in a thread would
# hold the GIL, and the training would wait for it.
SCRIPT_EDITS = {
    "python": "in another process (multiprocessing; a thread would hold the GIL)",
    "short calls": "as one operator on the whole batch",
    "library": "in another process, or in a thread if the library releases the GIL",
    "torch": "in a thread (operators of torch release the GIL)",
    "file": "in a thread (it releases the GIL while it reads or writes)",
    "wait": "in a thread whose result a later step uses",
    "garbage collection": "with fewer Python objects",
}


def edit_script(e: Evidence, cause: Cause) -> Saving | None:
    """Propose how the script does its other work, by what that work does."""
    where = SCRIPT_EDITS.get(str(cause.evidence.get("doing")), "in another process")
    edit = f"do this work less often, or {where}"
    return Saving(edit, Interval(cause.share, *cause.interval), RECORD)


def edit_operators(e: Evidence, cause: Cause) -> Saving | None:
    """Propose the edit of a finding inside the model, whose share is an upper bound."""
    edit = cause.evidence.get("remedy")
    if cause.id == "precision" and edit is None:  # parameters in float64 have other remedies
        return None
    edit = edit or "do not compute this, or compute it in fewer operators"
    return Saving(edit, Interval(cause.share / 2, 0.0, cause.share), RECORD)
