"""Claim: where computing takes eight times the exchange, a step takes at most 1.03 (zero1), 1.10
(zero2) and 1.30 (zero3) of that of data parallel. A rank's peak memory is within 5 % of the rule
for its layout, plus the largest block.

All layouts train in the same processes, in turns. Memory is the peak of the resident set of a
process that trains one layout, without the memory that it had before.
"""

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
    run,
    spread,
    target,
)

LIMITS = {"zero1": 1.03, "zero2": 1.10, "zero3": 1.30}
MEMORY_LIMIT = 1.05
WORKSPACE_BLOCKS = 4
LAYOUTS = ["data", *LIMITS]


def rule(layout: str, ranks: int) -> float:
    """Return bytes of a parameter with Adam in float32, without activations."""
    return {
        "data": 16.0,
        "zero1": 8 + 8 / ranks,
        "zero2": 4 + 12 / ranks,
        "zero3": 16 / ranks,
    }[layout]


def main() -> None:
    parser = options("layout_time", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--memory-width", type=int, default=2048)
    args = parser.parse_args()
    steps: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for ranks in args.ranks:
        for exchange in ("paceline", "gloo"):
            steps[f"{ranks} ranks, {exchange}"] = measure(
                ranks, exchange, LAYOUTS, args.width, args.repeats, 0
            )
        memory[str(ranks)] = {
            layout: memory_of(ranks, layout, args.memory_width) for layout in LAYOUTS
        }
    report(args, steps, memory)


def memory_of(ranks: int, layout: str, width: int) -> dict[str, Any]:
    found = measure(ranks, "paceline", [layout], width, 0, 8)
    count = found["parameters"]
    block = 0 if layout == "data" else 4 * (width * width + width)
    expected, peak = rule(layout, ranks) * count, found["peak_bytes"][layout]
    return {
        "peak_bytes": peak,
        "rule_bytes": expected,
        "block_bytes": block,
        "ratio": peak / (expected + block),
        # gathered buffer, whole parameters, their gradients, and the buffer that is reduced
        "ratio_with_workspace": peak / (expected + WORKSPACE_BLOCKS * block),
    }


def measure(
    ranks: int, exchange: str, layouts: list[str], width: int, rounds: int, batch: int
) -> dict[str, Any]:
    given = ["--layouts", *layouts, "--width", width, "--rounds", rounds, "--batch", batch]
    environment = {"OMP_NUM_THREADS": "1"}
    if batch:
        # glibc then returns the memory of every tensor at once, so that the resident set is exact
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    if exchange == "gloo":
        environment["PACELINE_EXCHANGE"] = "gloo"
    return dict(result_of(on_ranks(ranks, "layouts/layout_steps.py", OUT, *given), **environment))


def report(args: Any, steps: dict[str, Any], memory: dict[str, Any]) -> None:
    table = new_table(
        "job", *LIMITS, title=f"Step time against data parallel, {args.repeats} rounds"
    )
    medians, ratios, targets = {}, {}, []
    for job, found in steps.items():
        times = found["step_s"]
        medians[job] = {layout: spread(values) for layout, values in times.items()}
        ratios[job] = {layout: ratio(times[layout], times["data"]) for layout in LIMITS}
        table.add_row(job, *(f"{ratios[job][layout]['median']:.2f}" for layout in LIMITS))
        if job.endswith("paceline"):
            targets += [
                target(f"step of {layout} on {job}, against data", limit, ratios[job][layout])
                for layout, limit in LIMITS.items()
            ]
    console.print(table)
    title = f"Peak memory against the rule and one block (and {WORKSPACE_BLOCKS} blocks)"
    table = new_table("ranks", *LAYOUTS, title=title)
    for ranks, found in memory.items():
        cells = [(found[name]["ratio"], found[name]["ratio_with_workspace"]) for name in LAYOUTS]
        table.add_row(ranks, *(f"{one:.2f} ({more:.2f})" for one, more in cells))
        targets += [
            target(
                f"memory of {layout} on {ranks} ranks, against the rule and one block",
                MEMORY_LIMIT,
                [one["ratio"]],
            )
            for layout, one in found.items()
        ]
    console.print(table)
    measurements = {"steps": steps, "memory": memory}
    finish(args, measurements, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
