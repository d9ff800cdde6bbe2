"""One rank of a check: ``paceline run -m paceline.study.probe [--data DIR] [--quick]``.

Rank 0 sends the results of all ranks to the launcher, for the file of its ``--json``; without a
launcher it prints them. Exit code 3: the results are complete except for hosts that did not answer,
whose ranks may not end without a signal."""

import argparse
import json
from pathlib import Path

from ...record.ring.launcher_messages import send_to_launcher
from .participants import HostDropped
from .run_check import USUAL, check

SOME_SILENT = 3
QUICK = 6.0  # seconds


def main() -> int:
    """Measure, send the results and return the exit code."""
    parser = argparse.ArgumentParser(prog="paceline.study.probe", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder whose storage is measured")
    parser.add_argument(
        "--seconds", type=float, help=f"approximate time for the measurements (default: {USUAL:g})"
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes and repetitions")
    given = parser.parse_args()
    seconds = given.seconds or (QUICK if given.quick else USUAL)
    try:
        found = check(given.data, seconds, given.quick)
    except HostDropped:
        return 0
    if found is None:
        return 0
    text = json.dumps(found)
    if not send_to_launcher(summary=text):
        print(text)
    return SOME_SILENT if found["unreachable"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
