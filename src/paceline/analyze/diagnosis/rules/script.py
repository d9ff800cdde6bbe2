"""The script's own work between the phases of its steps, with the line, and what stands still in
the middle of them."""

import re

from ..evidence import WORTH, Evidence, Said
from .compute import held

# What makes a rank wait for its device, for a terminal or for all others.
HOLDS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bprint\(|\.flush\(|synchronize\(|barrier\(|"
    r"\.to\([\"']cpu"
)
STANDS = 0.1  # of a step: less may be the system's


def script(e: Evidence) -> Said:
    losses = e.lost("other")
    lines = [line for loss in losses for line in loss.lines]
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    if lines and HOLDS.search(str(lines[0]["code"])):
        sentence = f"the script stands still for a value or an output between its steps{where}"
        return "synchronisation", sentence, {"lines": lines}
    return "script", f"the script does work of its own between its steps{where}", {"lines": lines}


def standing(e: Evidence) -> float:
    """What all ranks are on no core in forward, backward and optimizer, with no exchange and no
    loader to wait for, no lack of a core and no other thread of Python that holds them. Where a
    GPU computes, that is as it should be."""
    silent = e.climbs.get("silent", [])
    crowded = (e.threads or 1) * e.per_host > (e.cores or 1)
    if not silent or crowded or e.said.get("gpu") or not all(one.silent for one in silent):
        return 0.0
    off = min(e.off_core("silent", rank) for rank in range(silent[0].ranks))
    own = ("other", "validation", "checkpoint", "input")
    found = off * e.of_step("silent") - e.share(*own)
    return found if found >= STANDS and held(e) < WORTH else 0.0


def stands(e: Evidence) -> Said:
    lines = e.lines.get("useful", [])
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    sentence = (
        "training stands still inside of its steps, on no core: it sleeps, or waits for a file or "
        f"another program{where}"
    )
    return "script", sentence, {"lines": lines}
