"""Claim: the predicted peak memory of a step is within 5 % of the measured one, for eleven models.

One process, data layout. Measured is the peak of PyTorch's CPU allocator (bytes as requested, by
the profiler), not of the resident set: memory that oneDNN or BLAS allocate themselves is in neither
figure. Kept-out models were measured only after the prediction was developed. It takes a minute.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    OUT,
    SCRIPTS,
    console,
    finish,
    new_table,
    options,
    result_of,
    run,
    spread,
    target,
    with_rounds,
)

LIMIT = 1.05


def main() -> None:
    parser = options("memory_prediction", __doc__ or "", repeats=1)
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    rounds = [measure(args.models) for _ in range(args.repeats)]
    headings = ("model", "predicted KiB", "measured KiB", "predicted / measured", "peak in")
    table = new_table(*headings, title="Peak memory of a step")
    medians, ratios, targets = {}, {}, []
    for name, row in rounds[0].items():
        values = [one[name]["predicted_bytes"] / one[name]["measured_bytes"] for one in rounds]
        ratios[name] = with_rounds(values)
        medians[name] = {
            what: spread([one[name][what] for one in rounds])
            for what in ("predicted_bytes", "measured_bytes")
        }
        kib = (f"{row[what] / 1024:.0f}" for what in ("predicted_bytes", "measured_bytes"))
        table.add_row(name, *kib, f"{ratios[name]['median']:.3f}", row["peak"])
        distances = [max(one, 1 / one) for one in values]
        kept_out = " (kept out)" if row["kept_out"] else ""
        claim = f"{name}{kept_out}: prediction within 5 % of the measured peak"
        targets.append(target(claim, LIMIT, distances, counted=True))
    console.print(table)
    finish(args, rounds, medians, ratios, targets)


def measure(models: list[str]) -> dict[str, dict[str, float]]:
    command = [sys.executable, SCRIPTS / "layouts/memory_prediction.py", OUT, *models]
    return dict(result_of(command, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    run(main)
