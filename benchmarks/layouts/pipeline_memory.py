"""Claim: the predicted memory of a pipeline's stages is within 15 % of the measured peak.

Adam in float32, two stages, four micro-batches of 16 samples. Measured is the peak of PyTorch's CPU
allocator over two steps (bytes as requested, by the profiler), not the resident set. Stages are
divided by measured times, which needs no quiet machine. It takes about 2 minutes.
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
    result_of,
    run,
    spread,
    target,
    with_rounds,
)

LIMIT = 1.15
LAYOUTS = ("pp2", "pp2 + schedule=gpipe", "pp2 x zero3")


def main() -> None:
    parser = options("pipeline_memory", __doc__ or "", repeats=1)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    rounds = [
        [row for layout in args.layouts for row in measure(layout, args.models)]
        for _ in range(args.repeats)
    ]
    headings = ("stage", "predicted", "measured", "predicted / measured")
    table = new_table(*headings, title="Peak memory of a stage, MiB")
    medians, ratios, targets = {}, {}, []
    for rows in zip(*rounds, strict=True):
        one = rows[0]
        name = f"{one['model']}, {one['layout']}, stage {one['stage']}"
        values = [row["predicted_bytes"] / row["measured_bytes"] for row in rows]
        ratios[name] = with_rounds(values)
        medians[name] = {
            what: spread([row[what] for row in rows])
            for what in ("predicted_bytes", "measured_bytes")
        }
        mib = (f"{one[what] / (1 << 20):.1f}" for what in ("predicted_bytes", "measured_bytes"))
        table.add_row(name, *mib, f"{ratios[name]['median']:.3f}")
        distances = [max(value, 1 / value) for value in values]
        claim = f"{name}: prediction within 15 % of the measured peak"
        targets.append(target(claim, LIMIT, distances, counted=True))
    console.print(table)
    finish(args, rounds, medians, ratios, targets)


def measure(layout: str, models: list[str]) -> list[dict[str, Any]]:
    ranks = 4 if "zero" in layout else 2
    command = on_ranks(ranks, "layouts/pipeline_memory.py", OUT, layout, *models)
    return list(result_of(command, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    run(main)
