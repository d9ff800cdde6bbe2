"""Claim: saving and loading sharded states takes at most 1.3 of what the storage needs.

The same bytes are written and flushed, and read, by as many processes, interleaved with the saves
and loads of sharded tensors (scripts/layouts/checkpoint_io.py). They are written through the page
cache and past it (O_DIRECT); of each round the faster one is what the storage gives. Loading
includes the verification of all checksums. Files are removed from the page cache before each read.
Meanwhile, training steps are timed with and without a checkpoint that is being written.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, launch, options, ratio, run, spread, target
from rich.table import Table

LIMIT = 1.3
STEP_LIMIT = 1.05


def main() -> None:
    parser = options("checkpoint_io", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=2048, help="of all ranks, default 2048")
    parser.add_argument("--folder", type=Path, help="on the storage to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        script = SCRIPTS / "layouts/checkpoint_io.py"
        result = Path(folder) / "result.json"
        words = [folder, str(args.mib), str(args.repeats), str(result)]
        command = [str(BIN / "paceline"), "run", "-n", str(args.ranks), str(script), *words]
        launch(command, OMP_NUM_THREADS="1")
        seconds = json.loads(result.read_text())
    if args.folder is not None:
        args.folder = str(args.folder)
    medians = {name: spread(values) for name, values in seconds.items()}
    writes = [seconds[name] for name in ("write_raw", "write_direct") if name in seconds]
    ratios = {
        "save": ratio(seconds["save"], [min(times) for times in zip(*writes, strict=True)]),
        "load": ratio(seconds["load"], seconds["read_raw"]),
        "step": ratio(seconds["step_while_writing"], seconds["step"]),
    }
    headings = ("", "seconds", "ratio to the storage, or to quiet steps")
    table = Table(*headings, title=f"{args.mib} MiB on {args.ranks} ranks, {args.repeats} rounds")
    of = {"save": "save", "load": "load", "step_while_writing": "step"}
    for name, values in medians.items():
        shown = f"{ratios[of[name]]['median']:.2f}" if name in of else ""
        table.add_row(name, f"{values['median']:.4f}", shown)
    console.print(table)
    targets = [
        target(f"saving within {LIMIT} of writing the same bytes", LIMIT, ratios["save"]),
        target(f"loading within {LIMIT} of reading the same bytes", LIMIT, ratios["load"]),
        target("steps while a checkpoint is written, within 5 %", STEP_LIMIT, ratios["step"]),
    ]
    finish(args, seconds, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
