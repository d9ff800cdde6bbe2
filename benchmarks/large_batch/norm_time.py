"""Claim: batch normalization over all ranks has at most two exchanges a layer, one in forward and
one in backward, also where ranks have different numbers of samples. Its step time is printed beside
that of local normalization: 2 ranks on CPUs, blocks of steps in turns.
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
    options,
    ratio,
    rounds,
    run,
    spread,
    target,
)
from rich.table import Table

LOCAL = "local"
KINDS = [LOCAL, "sync", "sync uneven", "ghost:8", "group:8"]


def main() -> None:
    parser = options("norm_time", __doc__ or "", repeats=16)
    parser.add_argument("--steps", type=int, default=20, help="of a block, default 20")
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank, default 32")
    args = parser.parse_args()
    order = [kind for kinds in rounds(KINDS, args.repeats) for kind in kinds]
    with console.status("norms"):
        ranks = measure(order, args)
    report(args, ranks)


def measure(order: list[str], args: Any) -> list[list[dict[str, Any]]]:
    """Return the blocks of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        words = [SCRIPTS / "large_batch/norm_steps.py", path, args.steps, args.batch]
        words = [BIN / "paceline", "run", "-n", 2, "--threads", 1, *words, json.dumps(order)]
        launch(words)
        return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(2)]


def report(args: Any, ranks: list[list[dict[str, Any]]]) -> None:
    table = Table("norm", "step, ms", "q1", "q3", "of local", "exchanges a layer")
    times, exchanges = {}, {}
    for kind in KINDS:
        blocks = [[one for one in of if one["kind"] == kind] for of in ranks]
        times[kind] = [
            max(statistics.median(one["s"]) for one in both) for both in zip(*blocks, strict=True)
        ]
        exchanges[kind] = max(one["exchanges_a_layer"] for of in blocks for one in of)
    ratios = {kind: ratio(found, times[LOCAL]) for kind, found in times.items()}
    for kind, found in times.items():
        of = [f"{1e3 * spread(found)[key]:.2f}" for key in ("median", "q1", "q3")]
        table.add_row(kind, *of, f"{ratios[kind]['median']:.2f}", f"{exchanges[kind]:g}")
    console.print(table)
    targets = [
        target(
            f"norm={kind}: at most 2 exchanges a layer",
            2,
            [exchanges[kind]],
            counted=True,
        )
        for kind in ("sync", "sync uneven")
    ]
    finish(
        args,
        {"step_s": times, "exchanges_a_layer": exchanges},
        {kind: spread(found) for kind, found in times.items()},
        ratios,
        targets,
    )


if __name__ == "__main__":
    run(main)
