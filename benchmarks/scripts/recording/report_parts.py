"""``paceline report FOLDER --json`` in this process. What it prints goes to one file; how long each
part of it took, its processor time and the most memory it held go to another."""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

begun = time.monotonic()  # before the imports below, which are one of the parts

from paceline.analyze.figures import losses, measured_window, report  # noqa: E402
from paceline.cli import app  # noqa: E402
from paceline.launch.monitor import running_jobs  # noqa: E402

# What a report is made of; the rest of its time is the interpreter's start and the JSON.
PARTS = {
    "read": [(running_jobs, "load_run")],
    "match": [(report, "match_collectives"), (report, "align_clocks")],
    "window": [(report, "find_window"), (losses, "split_into_ranges")],
    "timelines": [
        (measured_window, "build_timeline"),
        (report.MatchedCommunication, "latest_arrivals"),
    ],
    "replay": [(measured_window, "ideal_length")],
    "losses": [(losses, "own_losses"), (losses, "wait_losses"), (losses, "transfer_losses")],
    "groups": [(report, "group_figures"), (report, "overlapped_ns")],
    "ranges": [(report, "_range_efficiencies")],
    "steps": [
        (measured_window, "steps_in_window"),
        *((report, "measure_steps"), (report, "longest_waits")),
    ],
}
seconds: dict[str, float] = defaultdict(float)


def timed(part: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.monotonic() - start

    return call


for part, functions in PARTS.items():
    for place, name in functions:
        setattr(place, name, timed(part, getattr(place, name)))
seconds["imports"] = time.monotonic() - begun

folder, output, figures = sys.argv[1:]
sys.argv = ["paceline", "report", folder, "--json"]
with open(output, "w") as sys.stdout:
    try:
        app()
    except SystemExit as end:
        code = end.code
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
told = {"peak_bytes": peak, "cpu_seconds": time.process_time(), "parts": seconds}
Path(figures).write_text(json.dumps(told))
sys.exit(code)
