"""Claim: in each layout a rank needs at most 5 % more memory than the rule for its layout, the
predicted activations and the largest block, for four models on 2 and 4 ranks.

Adam in float32, batches of 8. Measured is the peak of PyTorch's CPU allocator over two steps (bytes
as requested, by the profiler), on the rank with the largest one; not the resident set. Beside it is
the peak that Paceline predicts, which also knows what is in memory at the same time, and how
many buffers FSDP2 has. It takes about 3 minutes.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, launch, machine, options, run, spread, target
from rich.table import Table

LIMIT = 1.05


def main() -> None:
    parser = options("memory_of_layouts", __doc__ or "", repeats=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    facts = machine()
    found = {
        ranks: [measured(ranks, args.models) for _ in range(args.repeats)] for ranks in args.ranks
    }
    table = Table(title="Peak memory of a rank, MiB")
    headings = ("rule", "activations", "block", "predicted", "measured")
    for heading in ("job", *headings, "measured / rule", "predicted / measured"):
        table.add_column(heading, justify="right")
    medians, ratios, targets = {}, {}, []
    for ranks, rounds in found.items():
        for rows in zip(*rounds, strict=True):
            job = f"{rows[0]['model']}, {rows[0]['layout']}, {ranks} ranks"
            against = [one["measured_bytes"] / expected(one) for one in rows]
            predicted = [one["predicted_bytes"] / one["measured_bytes"] for one in rows]
            ratios[job] = {
                "measured / rule": {"rounds": against, **spread(against)},
                "predicted / measured": {"rounds": predicted, **spread(predicted)},
            }
            medians[job] = {
                what: spread([one[what] for one in rows])
                for what in ("predicted_bytes", "measured_bytes")
            }
            names = ("rule", "activation", "block", "predicted", "measured")
            cells = (f"{rows[0][f'{name}_bytes'] / (1 << 20):.1f}" for name in names)
            shown = (f"{one['median']:.3f}" for one in ratios[job].values())
            table.add_row(job, *cells, *shown)
            rule = ratios[job]["measured / rule"]
            claim = f"{job}: rule, activations and largest block"
            targets.append(target(claim, LIMIT, rule, counted=True))
            distances = [max(one, 1 / one) for one in predicted]
            claim = f"{job}: prediction within 5 % of the measured peak"
            found_distances = {"rounds": distances, **spread(distances)}
            targets.append(target(claim, LIMIT, found_distances, counted=True))
    console.print(table)
    finish(
        "memory_of_layouts",
        args,
        facts,
        measurements=found,
        medians=medians,
        ratios=ratios,
        targets=targets,
    )


def expected(row: dict[str, Any]) -> int:
    """Return the bytes of the claim."""
    return int(row["rule_bytes"] + row["activation_bytes"] + row["block_bytes"])


def measured(ranks: int, models: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(SCRIPTS / "layouts/memory_of_layouts.py")
        command = [str(BIN / "paceline"), "run", "-n", str(ranks), script, str(out), *models]
        launch(command, OMP_NUM_THREADS="1")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    run(main)
