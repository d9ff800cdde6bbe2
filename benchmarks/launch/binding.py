"""What the right binding and thread count gain, and what wrong ones cost, on this machine.

The same plain DDP loop (a small CNN on digits) on as many ranks as there are cores: as torchrun
starts it, by `paceline run` bound to a core each and not bound, with two threads a rank, and with
all ranks on one core. A round's figure is the median step of rank 0.
"""

import os
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

BASE = "torchrun"  # which sets OMP_NUM_THREADS=1 and does not bind
WAYS = {  # name: what stands before the launcher, and its options
    BASE: ([], None),
    "paceline, a core each": ([], ["--bind", "core"]),
    "paceline, not bound": ([], ["--bind", "none"]),
    "paceline, two threads a core": ([], ["--bind", "none", "--threads", "2"]),
    "paceline, all on one core": (["taskset", "-c", "0"], ["--bind", "none"]),
}


def main() -> None:
    parser = options("binding", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", type=int, default=300, help="measured steps a run")
    parser.add_argument("--warmup", type=int, default=30, help="steps before them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # each launcher's own choice
    ways = [BASE, *(name for name in args.ways if name != BASE)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = [name for names in rounds(ways, args.repeats) for name in names]
    for name in track(order, "binding", transient=True):
        times[name].append(measure(name, args))
    report(args, times)


def measure(name: str, args: Any) -> float:
    """The median step of one run, in microseconds."""
    before, words = WAYS[name]
    start = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(args.ranks)]
    if words is not None:
        start = [str(BIN / "paceline"), "run", "-n", str(args.ranks), *words]
    arguments = [OUT, args.warmup, args.steps, "view"]
    command = [*before, *start, SCRIPTS / "launch/steps_ddp.py", *arguments]
    return statistics.median(result_of(command))


def report(args: Any, times: dict[str, list[float]]) -> None:
    medians = {name: spread(values) for name, values in times.items()}
    ratios = {name: ratio(values, times[BASE]) for name, values in times.items()}
    headings = ("started by", "µs: median (quartiles)", "ratio by round: median (quartiles)")
    table = new_table(*headings, title=f"A step on {args.ranks} ranks, {args.repeats} rounds")
    for name in times:
        m, r = medians[name], ratios[name]
        table.add_row(
            name,
            f"{m['median']:.0f} ({m['q1']:.0f}-{m['q3']:.0f})",
            "1" if name == BASE else f"{r['median']:.3f} ({r['q1']:.3f}-{r['q3']:.3f})",
        )
    console.print(table)
    claim = "a step bound to a core each takes no longer than torchrun's default"
    bound = "paceline, a core each"
    targets = [target(claim, 1.0, ratios[bound])] if bound in ratios else []
    finish(args, times, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
