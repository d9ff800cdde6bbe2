"""Rules for work of the script between the phases of a step, and for sleeping within phases."""

import re

from ..evidence import MIN_SHARE, Evidence, NamedCause
from .compute import interpreter_lock_share
from .lines import lines_in_state

# Calls that make a rank wait for its device, for a terminal or for all other ranks.
SYNCHRONISING_CALLS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bprint\(|\.flush\(|synchronize\(|barrier\(|"
    r"\.to\([\"']cpu"
)
MIN_STANDING = 0.1  # of a step: less may be caused by the operating system


def script(e: Evidence) -> NamedCause:
    losses = e.losses_of_kind("other")
    lines = [line for loss in losses for line in loss.lines]
    if e.line_profile is not None:  # it has more samples
        lines = lines_in_state(e.line_profile, "other") or lines
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    if lines and SYNCHRONISING_CALLS.search(str(lines[0]["code"])):
        sentence = f"the script waits for a value or an output between its steps{where}"
        return "synchronisation", sentence, {"lines": lines}
    return "script", f"the script does other work between its steps{where}", {"lines": lines}


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
    lines = e.lines.get("useful", [])
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    sentence = (
        "the training uses no core in a part of its steps: it sleeps, or waits for a file or "
        f"another program{where}"
    )
    return "script", sentence, {"lines": lines}
