"""Claim: in each layout a rank needs at most 5 % more memory than the rule for its layout, the
predicted activations and the largest block, for four models on 2 and 4 ranks.

Adam in float32, batches of 8. Measured is the peak of PyTorch's CPU allocator over two steps (bytes
as requested, by the profiler), on the rank with the largest one; not the resident set. Beside it is
the peak that Paceline predicts, which also knows what is in memory at the same time, and how
many buffers FSDP2 has. It takes about 3 minutes.
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

LIMIT = 1.05


def main() -> None:
    parser = options("memory_of_layouts", __doc__ or "", repeats=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="*", default=[], help="default: all")
    args = parser.parse_args()
    found = {
        ranks: [measure(ranks, args.models) for _ in range(args.repeats)] for ranks in args.ranks
    }
    headings = ("rule", "activations", "block", "predicted", "measured")
    headings = ("job", *headings, "measured / rule", "predicted / measured")
    table = new_table(*headings, title="Peak memory of a rank, MiB")
    medians, ratios, targets = {}, {}, []
    for ranks, rounds in found.items():
        for rows in zip(*rounds, strict=True):
            job = f"{rows[0]['model']}, {rows[0]['layout']}, {ranks} ranks"
            against = [one["measured_bytes"] / expected_bytes(one) for one in rows]
            predicted = [one["predicted_bytes"] / one["measured_bytes"] for one in rows]
            ratios[job] = {
                "measured / rule": with_rounds(against),
                "predicted / measured": with_rounds(predicted),
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
            targets.append(target(claim, LIMIT, distances, counted=True))
    console.print(table)
    finish(args, found, medians, ratios, targets)


def expected_bytes(row: dict[str, Any]) -> int:
    """Return the bytes of the claim."""
    return int(row["rule_bytes"] + row["activation_bytes"] + row["block_bytes"])


def measure(ranks: int, models: list[str]) -> list[dict[str, Any]]:
    command = on_ranks(ranks, "layouts/memory_of_layouts.py", OUT, *models)
    return list(result_of(command, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    run(main)
