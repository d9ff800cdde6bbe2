"""Claim: on 2 ranks of a tensor axis, a step of a perceptron with layers of 8k x 8k at batch 256
takes at most 0.62 of that of one rank, one thread each, and each rank holds half of the parameters
within 2 %.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    SCRIPTS,
    console,
    finish,
    launch,
    machine,
    options,
    ratio,
    rounds,
    run,
    spread,
    target,
)
from rich.table import Table

STEP_LIMIT, PARAMETER_LIMIT = 0.62, 0.51
JOBS = {  # ranks, layout, exchange
    "one rank": (1, "data", ""),
    "tp2, paceline": (2, "tp2", ""),
    "tp2, gloo": (2, "tp2", "gloo"),
}


def main() -> None:
    parser = options("tensor_time", __doc__ or "", repeats=3)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="of each round, after the first one")
    args = parser.parse_args()
    facts = machine()
    times: dict[str, list[float]] = {job: [] for job in JOBS}
    sizes: dict[str, list[float]] = {job: [] for job in JOBS}
    for order in rounds(list(JOBS), args.repeats):
        for job in order:
            found = measure(job, args)
            times[job].append(statistics.median(found["step_s"]))
            sizes[job].append(found["parameter_bytes"])
    report(args, facts, times, sizes)


def measure(job: str, args: Any) -> dict[str, Any]:
    ranks, layout, exchange = JOBS[job]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        given = {name: getattr(args, name) for name in ("width", "layers", "batch", "steps")}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        environment = {"OMP_NUM_THREADS": "1"} | (
            {"PACELINE_EXCHANGE": exchange} if exchange else {}
        )
        script = str(SCRIPTS / "layouts/tensor_steps.py")
        start = [str(BIN / "paceline"), "run", "-n", str(ranks)]
        launch([*start, script, str(out), "--layout", layout, *words], **environment)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def report(args: Any, facts: dict[str, Any], times: Any, sizes: Any) -> None:
    table = Table(title=f"Step of {args.layers} layers of {args.width} x {args.width}")
    for heading in ("job", "step", "of one rank", "parameters of a rank"):
        table.add_column(heading, justify="right")
    ratios: dict[str, Any] = {}
    targets = []
    for job in JOBS:
        step = ratio(times[job], times["one rank"])
        part = ratio(sizes[job], sizes["one rank"])
        ratios[job] = {"step": step, "parameters": part}
        seconds = statistics.median(times[job])
        table.add_row(job, f"{seconds:.2f} s", f"{step['median']:.2f}", f"{part['median']:.3f}")
        if job == "tp2, paceline":
            targets += [
                target(f"step of {job}, against one rank", STEP_LIMIT, step),
                target(f"parameters of a rank of {job}", PARAMETER_LIMIT, part),
            ]
    console.print(table)
    measurements = {"step_s": times, "parameter_bytes": sizes}
    found = {
        "medians": {job: {"step_s": spread(values)} for job, values in times.items()},
        "ratios": ratios,
        "targets": targets,
    }
    finish("tensor_time", args, facts, measurements=measurements, **found)


if __name__ == "__main__":
    run(main)
