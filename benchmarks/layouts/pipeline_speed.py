"""Claim: two stages with a core each reach 0.9 of the speed that the formula allows.

One process with one thread trains a stack of equal layers, and a pipeline of two stages, one thread
each, trains the same batches, in turns. The formula allows a speed-up of K (1 - idle) for K stages:
each computes a K-th of the batch's work, and is idle for the share of the schedule. Stages of equal
layers are not quite equal: the first one computes no gradient of its input, and the last one the
loss. The longer one has 1.4 % more than half of the matrix products of 24 layers, and 4.3 % more of
those of 8. What small micro-batches cost is part of the result: ``--samples 512`` has some of 32
samples. "both cores" is a process on each core without exchange: what the machine gives to two
processes. It takes 5 minutes, and needs two cores that nothing else uses.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    SCRIPTS,
    console,
    finish,
    options,
    ratio,
    rounds,
    run,
    spread,
    target,
    with_rounds,
)
from rich.table import Table

from paceline.cost.layout import idle_share

LIMIT = 1 / 0.9  # of the seconds that the formula allows
STAGES = 2
ALONE, BOTH = "one process", "both cores"


def main() -> None:
    parser = options("pipeline_speed", __doc__ or "", repeats=4)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zero-bubble"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4096, help="of a batch, on all stages")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    alternatives = [ALONE, BOTH] + [
        f"{schedule} {count}" for schedule in args.schedules for count in args.micro_batches
    ]
    for order in rounds(alternatives, args.repeats):
        for name in order:
            seconds.setdefault(name, []).append(measure(args, name))
    reached: dict[str, Any] = {}
    headings = ("pipeline", "speed-up", "the formula allows", "reached")
    table = Table(*headings, title="Speed-up of two stages, median")
    for name in alternatives[2:]:
        schedule, count = name.split()
        allowed = STAGES * (1 - idle_share(schedule, STAGES, int(count)))
        pairs = zip(seconds[ALONE], seconds[name], strict=True)
        values = [two / (one / allowed) for one, two in pairs]
        key = f"{schedule}, {count} micro-batches"
        reached[key] = with_rounds(values)
        median = reached[key]["median"]
        table.add_row(key, f"{allowed / median:.2f}", f"{allowed:.2f}", f"{1 / median:.1%}")
    console.print(table)
    slower = ratio(seconds[BOTH], seconds[ALONE])
    console.print(f"a process takes {slower['median']:.2f} times as long if both cores compute")
    finish(
        args,
        seconds,
        {name: {"step": spread(values)} for name, values in seconds.items()},
        reached | {"both cores / one process": slower},
        [
            target(f"{key}: seconds of a step, of those that the formula allows", LIMIT, of)
            for key, of in reached.items()
        ],
    )


def measure(args: Any, name: str) -> float:
    """Return the median seconds of a step."""
    what = {key: getattr(args, key) for key in ("layers", "width", "samples", "steps")}
    what["name"] = name
    ranks = "1" if name == ALONE else str(STAGES)
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
