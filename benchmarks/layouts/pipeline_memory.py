"""Claim: the predicted memory of a pipeline's stages is within 15 % of the measured peak.

Adam in float32, two stages, four micro-batches of 16 samples. Measured is the peak of PyTorch's CPU
allocator over two steps (bytes as requested, by the profiler), not the resident set. Stages are
divided by measured times, which needs no quiet machine. It takes about 2 minutes.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, launch, machine, options, run, spread, target
from rich.table import Table

LIMIT = 1.15
LAYOUTS = ("pp2", "pp2 + schedule=gpipe", "pp2 x zero3")


def main() -> None:
    parser = options("pipeline_memory", __doc__ or "", repeats=1)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    facts = machine()
    rounds = [
        [row for layout in args.layouts for row in measured(layout, args.models)]
        for _ in range(args.repeats)
    ]
    table = Table(title="Peak memory of a stage, MiB")
    for heading in ("stage", "predicted", "measured", "predicted / measured"):
        table.add_column(heading, justify="right")
    medians, ratios, targets = {}, {}, []
    for rows in zip(*rounds, strict=True):
        one = rows[0]
        name = f"{one['model']}, {one['layout']}, stage {one['stage']}"
        values = [row["predicted_bytes"] / row["measured_bytes"] for row in rows]
        ratios[name] = {"rounds": values, **spread(values)}
        medians[name] = {
            what: spread([row[what] for row in rows])
            for what in ("predicted_bytes", "measured_bytes")
        }
        mib = (f"{one[what] / (1 << 20):.1f}" for what in ("predicted_bytes", "measured_bytes"))
        table.add_row(name, *mib, f"{ratios[name]['median']:.3f}")
        distances = [max(value, 1 / value) for value in values]
        claim = f"{name}: prediction within 15 % of the measured peak"
        found = {"rounds": distances, **spread(distances)}
        targets.append(target(claim, LIMIT, found, counted=True))
    console.print(table)
    finish(
        "pipeline_memory",
        args,
        facts,
        measurements=rounds,
        medians=medians,
        ratios=ratios,
        targets=targets,
    )


def measured(layout: str, models: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(SCRIPTS / "layouts/pipeline_memory.py")
        ranks = "4" if "zero" in layout else "2"
        command = [str(BIN / "paceline"), "run", "-n", ranks, script, str(out), layout, *models]
        launch(command, OMP_NUM_THREADS="1")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    run(main)
