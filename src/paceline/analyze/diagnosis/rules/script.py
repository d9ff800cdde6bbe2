"""Rules for work of the script between the phases of a step, and for sleeping within phases."""

import re
from typing import Any

from ..descriptions import SCRIPT, CauseKind, Indicator
from ..evidence import MIN_SHARE, Evidence, NamedCause
from ..line_profile import Doing
from .compute import interpreter_lock_share
from .lines import activity_in_state, library_loops, lines_in_state, mostly_in, waiting_lines

# Calls that make a rank wait for its device, for a terminal or for all other ranks.
SYNCHRONISING_CALLS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bprint\(|\.flush\(|synchronize\(|barrier\(|"
    r"\.to\([\"']cpu"
)
# Work between the steps that is no line of the script: no edit of the script avoids a smaller one.
MIN_LIBRARY_SHARE = 0.15
MIN_STANDING = 0.1  # of a step: less may be caused by the operating system


# What a line does that waits for a value or an output. An operator may wait for a GPU, too.
_WAITING = (Doing.WAIT, Doing.FILE, Doing.COLLECTIVE)


def script(e: Evidence) -> NamedCause | None:
    losses = e.losses_of_kind("other")
    lines = [line for loss in losses for line in loss.lines]
    doing = None
    if e.line_profile is not None and (sampled := lines_in_state(e.line_profile, "other")):
        lines, doing = sampled, activity_in_state(e.line_profile, "other")  # it has more samples
    where = mostly_in(lines)
    evidence: dict[str, Any] = {"lines": lines, "doing": str(doing) if doing else None}
    calls = bool(lines) and SYNCHRONISING_CALLS.search(str(lines[0]["code"])) is not None
    # a line that computes its value does not wait for it
    waits = doing in (None, *_WAITING) or (doing == Doing.TORCH and bool(e.first_facts.get("gpu")))
    if calls and waits:
        sentence = f"the script waits for a value or an output between its steps{where}"
        return "synchronisation", sentence, evidence
    loops = library_loops(e.line_profile) if e.line_profile is not None else set()
    if lines and (lines[0].get("file"), lines[0].get("line")) in loops:
        if sum(loss.share for loss in losses) < MIN_LIBRARY_SHARE:
            return None
        sentence = f"the library with the training loop does other work between its steps{where}"
        return "script", sentence, evidence
    return "script", f"the script does other work between its steps{where}", evidence


def off_core_share(e: Evidence) -> float:
    """Return the share of time in which all ranks are off-core in forward, backward and optimizer.

    Only time in which a rank does not wait for communication, a loader, a core or another Python
    thread. On a GPU, off-core time is expected, and 0 is returned.
    """
    silent = e.rungs.get("silent", [])
    crowded = (e.threads or 1) * e.per_host > (e.cores or 1)
    if not silent or crowded or e.first_facts.get("gpu") or not all(one.silent for one in silent):
        return 0.0
    off = min(e.off_core("silent", rank) for rank in range(silent[0].ranks))
    own = ("other", "validation", "checkpoint", "input")
    found = off * e.relative_step_time("silent") - e.loss_share(*own)
    return found if found >= MIN_STANDING and interpreter_lock_share(e) < MIN_SHARE else 0.0


def off_core(e: Evidence) -> NamedCause:
    lines = waiting_lines(e.line_profile, "useful") if e.line_profile is not None else []
    lines = lines or e.lines.get("useful", [])
    where = mostly_in(lines)
    sentence = (
        "the training uses no core in a part of its steps: it sleeps, or waits for a file or "
        f"another program{where}"
    )
    return "script", sentence, {"lines": lines, "doing": str(Doing.WAIT)}


# Descriptions

CAUSES = (
    CauseKind(
        "script",
        SCRIPT,
        "other work of the script",
        "the script works between the phases of its steps, with the line (if a library runs the "
        "training loop, from 15 % of a step on); or the training uses no core in 10 % or more of a"
        " step, and does not wait for a collective, a loader or a thread",
        states=("other",),
    ),
)

INDICATORS = (
    Indicator(
        "script",
        "other work of the script",
        "Work of the script between the phases of its steps. Only the record measures it.",
        script,
        lambda e: e.loss_share("other"),
    ),
    Indicator(
        "standing",
        "time off the CPU",
        "Time within steps without communication in which the training thread ran on no core, did "
        "not wait for its loader, and no other thread blocked it.",
        off_core,
        off_core_share,
    ),
)
