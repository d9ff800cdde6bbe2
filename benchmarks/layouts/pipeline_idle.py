"""Claim: pipelines are idle for the share of their schedule's formula, within 3 percent points.

Stages sleep in place of computing, the same time in each stage: a forward takes one unit, a
backward two. The idle share of a step is one minus the time in which a rank is in the forward or
the backward of a micro-batch, as reports have it, mean of all ranks. It is compared with
(K - 1) / (M + K - 1) for K stages and M micro-batches; interleaved stages divide K - 1 by 2, and
the zero-bubble schedule by 3. It takes 3 minutes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, options, run, spread, target, with_rounds
from rich.table import Table

from paceline.cost.layout import idle_share

LIMIT = 0.03
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def main() -> None:
    parser = options("pipeline_idle", __doc__ or "", repeats=6)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--sleep-ms", type=float, default=25.0, help="of a forward")
    args = parser.parse_args()
    idle: dict[str, list[float]] = {}
    formula: dict[str, float] = {}
    for stages in args.stages:
        for name, times in measure(args, stages).items():
            schedule, count = name.split()
            key = f"{schedule}, {stages} stages, {count} micro-batches"
            idle[key] = [1 - computing / seconds for computing, seconds in times]
            formula[key] = idle_share(schedule, stages, int(count))
    table = Table(
        "pipeline", "measured", "formula", title="Idle share of a step, median (quartiles)"
    )
    for key, values in idle.items():
        s = spread(values)
        measured = f"{s['median']:.1%} ({s['q1']:.1%}-{s['q3']:.1%})"
        table.add_row(key, measured, f"{formula[key]:.1%}")
    console.print(table)
    differences = {k: [abs(v - formula[k]) for v in values] for k, values in idle.items()}
    ratios = {key: with_rounds(values) for key, values in differences.items()}
    targets = [
        target(f"{key}: idle share differs from the formula by at most {LIMIT}", LIMIT, ratios[key])
        for key in idle
    ]
    finish(
        args,
        idle,
        {key: {"idle": spread(values)} for key, values in idle.items()},
        ratios,
        targets,
        formula=formula,
    )


def measure(args: Any, stages: int) -> dict[str, list[list[float]]]:
    """Return seconds of computing and of the whole step, by schedule and micro-batches."""
    what = {
        "schedules": SCHEDULES,
        "micro_batches": args.micro_batches,
        "sleep_s": args.sleep_ms / 1e3,
        "steps": args.repeats,
    }
    script = str(SCRIPTS / "layouts/pipeline_steps.py")
    done = subprocess.run(
        [str(BIN / "paceline"), "run", "-n", str(stages), script, json.dumps(what)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    lines = [line for line in done.stdout.splitlines() if "times " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{done.stdout}\n{done.stderr}")
    found: dict[str, list[list[float]]] = json.loads(lines[0].split("times ", 1)[1])
    return found


if __name__ == "__main__":
    run(main)
