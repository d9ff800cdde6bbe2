"""Pictures of the schedules of pipelines, from records of pipelines whose stages sleep.

For each schedule, `paceline run --record` runs a few steps of pipeline_steps.py in `scripts`. The
picture is the last step: a row for each rank, and a cell for each unit of time, which is that of a
forward. It takes half a minute.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, run

from paceline.analyze.records.load_run import load_run
from paceline.cost.layout import chunks_of
from paceline.parallel.pipeline.execution.schedules import SCHEDULES
from paceline.record.ring.states import State

SLEEP_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    args = parser.parse_args()
    for schedule in args.schedules:
        console.print(schedule)
        for rank, row in enumerate(rows(schedule, args.stages, args.micro_batches)):
            console.print(f"  {rank} | {' '.join(row)}", highlight=False, soft_wrap=True)


def rows(schedule: str, stages: int, count: int) -> list[list[str]]:
    """Return the cells of each rank."""
    what = {
        "schedules": [schedule],
        "micro_batches": [count],
        "sleep_s": SLEEP_S,
        "steps": 3,
        "record": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        script = str(SCRIPTS / "layouts/pipeline_steps.py")
        command = [str(BIN / "paceline"), "run", "-n", str(stages), "--record", f"{folder}/record"]
        subprocess.run(
            [*command, script, json.dumps(what)],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        records = load_run(Path(folder) / "record").records
        actions = [list(SCHEDULES[schedule](rank, stages, count)) for rank in range(stages)]
        events = [
            sorted(
                record.events_in(State.FORWARD, State.BACKWARD)[["start", "end"]].tolist(),
            )[-len(of) :]
            for record, of in zip(records, actions, strict=True)
        ]
    unit = SLEEP_S / chunks_of(schedule) * 1e9
    first = min(start for of in events for start, _ in of)
    last = max(round((end - first) / unit) for of in events for _, end in of)
    return [_cells(named, of, first, unit, last) for named, of in zip(actions, events, strict=True)]


def _cells(actions: Any, events: Any, first: float, unit: float, last: int) -> list[str]:
    cells = [".."] * last
    for action, (start, end) in zip(actions, events, strict=True):
        name = f"{action.kind}{action.micro_batch}{chr(39) * action.chunk}"
        begin = round((start - first) / unit)
        for at in range(begin, max(round((end - first) / unit), begin + 1)):
            if at < last:
                cells[at] = name
    width = max(map(len, cells))
    return [cell.ljust(width, "." if cell == ".." else " ") for cell in cells]


if __name__ == "__main__":
    run(main)
