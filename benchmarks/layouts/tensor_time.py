"""Claim: on 2 ranks of a tensor axis, a step of a perceptron with layers of 8k x 8k at batch 256
takes at most 0.62 of that of one rank, one thread each, and each rank holds half of the parameters
within 2 %.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    OUT,
    console,
    finish,
    new_table,
    on_ranks,
    options,
    ratio,
    result_of,
    rounds,
    run,
    spread,
    target,
)

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
    times: dict[str, list[float]] = {job: [] for job in JOBS}
    sizes: dict[str, list[float]] = {job: [] for job in JOBS}
    for order in rounds(list(JOBS), args.repeats):
        for job in order:
            found = measure(job, args)
            times[job].append(statistics.median(found["step_s"]))
            sizes[job].append(found["parameter_bytes"])
    report(args, times, sizes)


def measure(job: str, args: Any) -> dict[str, Any]:
    ranks, layout, exchange = JOBS[job]
    given = {name: getattr(args, name) for name in ("width", "layers", "batch", "steps")}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    environment = {"PACELINE_EXCHANGE": exchange} if exchange else {}
    command = on_ranks(ranks, "layouts/tensor_steps.py", OUT, "--layout", layout, *words)
    return dict(result_of(command, OMP_NUM_THREADS="1", **environment))


def report(args: Any, times: Any, sizes: Any) -> None:
    headings = ("job", "step", "of one rank", "parameters of a rank")
    title = f"Step of {args.layers} layers of {args.width} x {args.width}"
    table = new_table(*headings, title=title)
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
    finish(
        args,
        measurements,
        {job: {"step_s": spread(values)} for job, values in times.items()},
        ratios,
        targets,
    )


if __name__ == "__main__":
    run(main)
