"""How much time does a study add to the time of its runs?

``paceline scale`` on 1 and 2 ranks of examples/surrogate.py. What a study adds is its own time less
that of the runs in its folder: the start, the first run that measures the duration of a step, what
happens between two runs (reading a record, fits, predictions), and the analysis at the end.

    python benchmarks/scale/study_overhead.py --minutes 5
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BENCHMARKS, BIN, finish, launch, options, ratio, run, spread, target

from paceline.analyze.scaling.study_folder import read_study

SCRIPT = BENCHMARKS.parent / "examples/surrogate.py"
LIMIT = 0.05
PARTS = ("before", "between", "after")


def study(minutes: float, batch: int) -> dict[str, float]:
    """Make a study; return its time, that of its runs, and what it adds before, between, after."""
    with tempfile.TemporaryDirectory(dir=BENCHMARKS.parent) as folder:  # seen by the overlay
        path = Path(folder) / "study"
        command = [str(BIN / "paceline"), "scale", "-n", "1,2", "--strong", "--output", str(path)]
        command += ["--minutes", f"{minutes:g}", str(SCRIPT), "--batch", str(batch)]
        began = time.time()
        start, end = launch(command)
        runs = read_study(path).runs
    total, in_runs = end - start, sum(run.took_s for run in runs)
    before = runs[0].started - began
    after = began + total - (runs[-1].started + runs[-1].took_s)
    return {
        "total": total,
        "runs": in_runs,
        "count": float(len(runs)),
        "before": before,
        "between": total - in_runs - before - after,
        "after": after,
    }


def main() -> None:
    parser = options("study_overhead", __doc__ or "", 3)
    parser.add_argument("--minutes", type=float, default=2.0, help="of each study")
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    began = time.monotonic()
    rounds: list[dict[str, Any]] = [study(args.minutes, args.batch) for _ in range(args.repeats)]
    runs = [one["runs"] for one in rounds]
    added = ratio([one["total"] - one["runs"] for one in rounds], runs)
    finish(
        args,
        rounds,
        {name: spread([one[name] for one in rounds]) for name in PARTS},
        {
            "added / runs": added,
            "between / runs": ratio([one["between"] for one in rounds], runs),
        },
        [target("the study's own time over that of its runs", LIMIT, added)],
        seconds=time.monotonic() - began,
    )


if __name__ == "__main__":
    run(main)
