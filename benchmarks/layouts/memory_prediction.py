"""Claim: the predicted peak memory of a step is within 5 % of the measured one, for eleven models.

One process, data layout. Measured is the peak of PyTorch's CPU allocator (bytes as requested, by
the profiler), not of the resident set: memory that oneDNN or BLAS allocate themselves is in neither
figure. Kept-out models were measured only after the prediction was developed. It takes a minute.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import SCRIPTS, console, finish, launch, machine, options, run, spread, target
from rich.table import Table

LIMIT = 1.05


def main() -> None:
    parser = options("memory_prediction", __doc__ or "", repeats=1)
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    facts = machine()
    rounds = [measured(args.models) for _ in range(args.repeats)]
    table = Table(title="Peak memory of a step")
    for heading in ("model", "predicted KiB", "measured KiB", "predicted / measured", "peak in"):
        table.add_column(heading, justify="right")
    medians, ratios, targets = {}, {}, []
    for name, row in rounds[0].items():
        values = [one[name]["predicted_bytes"] / one[name]["measured_bytes"] for one in rounds]
        ratios[name] = {"rounds": values, **spread(values)}
        medians[name] = {
            what: spread([one[name][what] for one in rounds])
            for what in ("predicted_bytes", "measured_bytes")
        }
        kib = (f"{row[what] / 1024:.0f}" for what in ("predicted_bytes", "measured_bytes"))
        table.add_row(name, *kib, f"{ratios[name]['median']:.3f}", row["peak"])
        distances = [max(one, 1 / one) for one in values]
        kept_out = " (kept out)" if row["kept_out"] else ""
        claim = f"{name}{kept_out}: prediction within 5 % of the measured peak"
        found = {"rounds": distances, **spread(distances)}
        targets.append(target(claim, LIMIT, found, counted=True))
    console.print(table)
    finish(
        "memory_prediction",
        args,
        facts,
        measurements=rounds,
        medians=medians,
        ratios=ratios,
        targets=targets,
    )


def measured(models: list[str]) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(SCRIPTS / "layouts/memory_prediction.py")
        launch([sys.executable, script, str(out), *models], OMP_NUM_THREADS="1")
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    run(main)
