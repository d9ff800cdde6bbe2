"""The script's own work between the phases of its steps, with the line."""

import re

from ..evidence import Evidence
from .ranks import Said

# What makes a rank wait for its device, for a terminal or for all others.
HOLDS = re.compile(
    r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|\bprint\(|\.flush\(|synchronize\(|barrier\(|"
    r"\.to\([\"']cpu"
)


def script(e: Evidence) -> Said:
    losses = e.lost("other")
    lines = [line for loss in losses for line in loss.lines]
    where = f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""
    if lines and HOLDS.search(str(lines[0]["code"])):
        sentence = f"the script stands still for a value or an output between its steps{where}"
        return "synchronisation", sentence, {"lines": lines}
    return "script", f"the script does work of its own between its steps{where}", {"lines": lines}
