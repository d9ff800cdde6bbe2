"""Claim: a step of a loop written with Paceline takes at most 2 % longer than in plain DDP.

Recording is on, as it is by default. The loop trains a small CNN on scikit-learn's digits; a
step's time is rank 0's, from the start of one iteration of the loop to the start of the next.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    OUT,
    SCRIPTS,
    console,
    finish,
    new_table,
    options,
    ratio,
    result_of,
    rounds,
    run,
    spread,
    target,
)
from rich.progress import track

LIMIT = 1.02
ALTERNATIVES = {  # name: launcher, script, its last argument
    "paceline": ("paceline", "launch/steps_paceline.py", "record"),
    "ddp view": ("torchrun", "launch/steps_ddp.py", "view"),
    "paceline, record=False": ("paceline", "launch/steps_paceline.py", "silent"),
    "ddp copy": ("torchrun", "launch/steps_ddp.py", "copy"),
}
BASE = "ddp view"  # gradient_as_bucket_view=True, as Paceline has it
MEANING = {
    "paceline": "Paceline",
    "ddp view": "plain DDP, gradient_as_bucket_view=True",
    "paceline, record=False": "Paceline, record=False",
    "ddp copy": "plain DDP, its default: False",
}


def main() -> None:
    parser = options("step_time", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="measured steps a run")
    parser.add_argument("--warmup", type=int, default=30, help="steps before them")
    args = parser.parse_args()
    times: dict[str, list[list[float]]] = {name: [] for name in ALTERNATIVES}
    order = [name for names in rounds(list(ALTERNATIVES), args.repeats) for name in names]
    for name in track(order, "step time", transient=True):
        times[name].append(measure(name, args))
    report(args, times)


def measure(name: str, args: Any) -> list[float]:
    """Microseconds of every measured step of one run."""
    launcher, script, variant = ALTERNATIVES[name]
    words = {
        "paceline": ["run", "-n", args.ranks],
        "torchrun": ["--standalone", "--nproc-per-node", args.ranks],
    }[launcher]
    arguments = [OUT, args.warmup, args.steps, variant]
    command = [BIN / launcher, *words, SCRIPTS / script, *arguments]
    return list(result_of(command, OMP_NUM_THREADS="1"))


def report(args: Any, times: dict[str, list[list[float]]]) -> None:
    by_round = {name: list(map(statistics.median, runs)) for name, runs in times.items()}
    medians = {name: spread(values) for name, values in by_round.items()}
    ratios = {name: ratio(values, by_round[BASE]) for name, values in by_round.items()}
    headings = ("loop", "µs a step: median (quartiles)", "ratio by round: median (quartiles)")
    title = f"Step time on {args.ranks} ranks, {args.repeats} rounds of {args.steps} steps"
    table = new_table(*headings, title=title)
    for name in ALTERNATIVES:
        m, r = medians[name], ratios[name]
        table.add_row(
            MEANING[name],
            f"{m['median']:.0f} ({m['q1']:.0f}-{m['q3']:.0f})",
            "1" if name == BASE else f"{r['median']:.3f} ({r['q1']:.3f}-{r['q3']:.3f})",
        )
    console.print(table)
    claim = f"Paceline's median step, recording on, at most {LIMIT} of plain DDP's"
    targets = [target(claim, LIMIT, ratios["paceline"])]
    finish(args, times, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
