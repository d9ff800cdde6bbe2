"""Claim: two stages with a core each reach 0.9 of the speed that the formula allows.

One process with one thread trains a stack of equal layers, and a pipeline of two stages, one thread
each, trains the same batches, in turns. The formula allows a speed-up of K (1 - idle) for K stages:
each computes a K-th of the batch's work, and is idle for the share of the schedule. What small
micro-batches cost is part of the result: ``--samples 512`` has some of 32 samples. It takes 3
minutes, and needs two cores that nothing else uses.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, machine, options, rounds, run, spread, target
from rich.table import Table

from paceline.cost.pipeline import idle_share

LIMIT = 1 / 0.9  # of the seconds that the formula allows
STAGES = 2


def main() -> None:
    parser = options("pipeline_speed", __doc__ or "", repeats=6)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zero-bubble"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4096, help="of a batch, on all stages")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    args = parser.parse_args()
    facts = machine()
    seconds: dict[str, list[float]] = {}
    alternatives = ["one process"] + [
        f"{schedule} {count}" for schedule in args.schedules for count in args.micro_batches
    ]
    for order in rounds(alternatives, args.repeats):
        for name in order:
            seconds.setdefault(name, []).append(measure(args, name))
    reached: dict[str, Any] = {}
    table = Table(title="Speed-up of two stages, median")
    for heading in ("pipeline", "speed-up", "the formula allows", "reached"):
        table.add_column(heading)
    for name in alternatives[1:]:
        schedule, count = name.split()
        allowed = STAGES * (1 - idle_share(schedule, STAGES, int(count)))
        pairs = zip(seconds["one process"], seconds[name], strict=True)
        values = [two / (one / allowed) for one, two in pairs]
        key = f"{schedule}, {count} micro-batches"
        reached[key] = {"rounds": values, **spread(values)}
        median = reached[key]["median"]
        table.add_row(key, f"{allowed / median:.2f}", f"{allowed:.2f}", f"{1 / median:.1%}")
    console.print(table)
    finish(
        "pipeline_speed",
        args,
        facts,
        measurements=seconds,
        medians={name: {"step": spread(values)} for name, values in seconds.items()},
        ratios=reached,
        targets=[
            target(f"{key}: seconds of a step, of those that the formula allows", LIMIT, of)
            for key, of in reached.items()
        ],
    )


def measure(args: Any, name: str) -> float:
    """Return the median seconds of a step."""
    what = {"name": name, "width": args.width, "samples": args.samples, "steps": args.steps}
    ranks = "1" if name == "one process" else str(STAGES)
    script = str(SCRIPTS / "layouts/pipeline_layers.py")
    done = subprocess.run(
        [str(BIN / "paceline"), "run", "-n", ranks, "--threads", "1", script, json.dumps(what)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    lines = [line for line in done.stdout.splitlines() if "seconds " in line]
    if done.returncode or not lines:
        raise SystemExit(f"{done.stdout}\n{done.stderr}")
    return float(lines[0].split("seconds ", 1)[1])


if __name__ == "__main__":
    run(main)
