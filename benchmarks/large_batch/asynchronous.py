"""Claim: synchronous training reaches an accuracy sooner than asynchronous training, unless a
worker is slow.

examples/asynchronous.py on digits: 4 workers that exchange gradients in each step, a parameter
server that does not wait for any of them, and one that bounds how far they are apart. Each step
sleeps STEP_MS, which stands for a device that computes, so that two cores are enough; with a slow
host, one worker sleeps SLOW times as long. Each way has the learning rate that is the fastest of
--rates with one seed; other seeds are compared. Seconds begin after the start of the ranks. Every
run is kept in --runs, so that the command continues after an interruption.

    python benchmarks/large_batch/asynchronous.py --pictures docs/pictures
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plotly.graph_objects as plots
from common import BENCHMARKS, BIN, console, finish, options, ratio, run, spread, target
from figures import COLORS, draw_figures
from kept_runs import KeptRuns
from plotly.subplots import make_subplots
from rich.table import Table

EXAMPLE = BENCHMARKS.parent / "examples" / "asynchronous.py"
WORKERS = 4
STEP_MS, SLOW = 12.0, 4.0
HOSTS = {"equal hosts": 1.0, "one slow host": SLOW}
SYNC, ASYNC = "synchronous", "asynchronous"
WAYS: dict[str, list[str]] = {
    SYNC: ["--mode", "sync"],
    ASYNC: ["--mode", "async"],
    "at most 4 steps apart": ["--mode", "async", "--staleness", "4"],
}


def main() -> None:
    parser = options("asynchronous", __doc__ or "", repeats=3)
    parser.add_argument("--pictures", type=Path, help="folder of the picture (needs Chromium)")
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy, default 0.95")
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    # of a batch of all workers; asynchronous updates have a worker's batch
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.4, 0.8])
    parser.add_argument("--runs", type=Path, default=BENCHMARKS / "out" / "asynchronous-runs.jsonl")
    args = parser.parse_args()
    runs = KeptRuns(args.runs, {"trained": [EXAMPLE]})
    found: dict[str, Any] = {}
    for host in args.hosts:
        for way in WAYS:
            with console.status(f"{host}, {way}"):
                found[f"{host}, {way}"] = of_way(runs, way, HOSTS[host], args)
    report(args, found)


def of_way(runs: KeptRuns, way: str, slow: float, args: Any) -> dict[str, Any]:
    """Return the runs of a way with the learning rate with which it is the fastest."""
    of: dict[str, Any] = {"words": WAYS[way], "workers": WORKERS, "step_ms": STEP_MS}
    of |= {"slow": slow, "goal": args.target}
    draws = {lr: runs(trained, **of, lr=lr, seed=0) for lr in args.rates}
    best = min(draws, key=lambda lr: (not draws[lr]["reached"], draws[lr]["seconds"]))
    seeds = range(1, 1 + args.repeats)
    kept = ("reached", "seconds", "samples", "mean_age")
    return {
        "lr": best,
        "runs": [runs(trained, **of, lr=best, seed=seed) for seed in seeds],
        "draws": {str(lr): {key: one[key] for key in kept} for lr, one in draws.items()},
    }


def trained(
    words: list[str],
    workers: int,
    step_ms: float,
    slow: float,
    goal: float,
    lr: float,
    seed: int,
) -> dict[str, Any]:
    is_sync = "sync" in words
    ranks = workers if is_sync else workers + 1
    words = [*words, "--lr", str(lr if is_sync else lr / workers), "--seed", str(seed)]
    words += ["--step-ms", str(step_ms), "--slow", str(slow), "--target", str(goal)]
    command = [BIN / "paceline", "run", "-n", str(ranks), "--threads", "1", EXAMPLE, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if '{"reached"' in line]
    if done.returncode or not lines:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    found: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])
    return found


def report(args: Any, found: dict[str, Any]) -> None:
    table = Table("", "lr", "s to accuracy", "low", "high", "reached", "samples", "updates", "age")
    seconds = {name: [one["seconds"] for one in way["runs"]] for name, way in found.items()}
    for name, way in found.items():
        times, runs = spread(seconds[name]), way["runs"]
        cells = [f"{times[key]:.2f}" for key in ("median", "low", "high")]
        cells.append(f"{sum(one['reached'] for one in runs)} of {len(runs)}")
        keys = {"samples": 0, "updates": 0, "mean_age": 1}
        cells += [f"{statistics.median(r[key] for r in runs):.{n}f}" for key, n in keys.items()]
        table.add_row(name, f"{way['lr']:g}", *cells)
    console.print(table)
    ratios = {
        f"{host}, {way}": ratio(seconds[f"{host}, {way}"], seconds[f"{host}, {SYNC}"])
        for host in args.hosts
        for way in WAYS
    }
    targets = []
    for host in args.hosts:
        a, b = (SYNC, ASYNC) if HOSTS[host] == 1 else (ASYNC, SYNC)  # the first one is faster
        of_both = ratio(seconds[f"{host}, {a}"], seconds[f"{host}, {b}"])
        targets.append(target(f"{host}: {a} / {b}, seconds to the accuracy", 1.0, of_both))
    if args.pictures:
        draw_figures(args.pictures, {"asynchronous": drawn(found, args.hosts)})
    finish(args, found, {name: spread(times) for name, times in seconds.items()}, ratios, targets)


def drawn(found: dict[str, Any], hosts: list[str]) -> Any:
    figure = make_subplots(1, len(hosts), subplot_titles=hosts, shared_yaxes=True)
    for column, host in enumerate(hosts, 1):
        for way, color in zip(WAYS, COLORS, strict=False):
            for number, one in enumerate(found[f"{host}, {way}"]["runs"]):
                times, _, accuracies = zip(*one["curve"], strict=True)
                figure.add_scatter(
                    x=times, y=accuracies, name=way, line={"color": color, "width": 1.5},
                    opacity=0.7, legendgroup=way, showlegend=column == 1 and number == 0,
                    row=1, col=column,
                )  # fmt: skip
    figure.update_layout(plots.Layout(width=900, height=420, margin={"l": 70, "r": 20, "t": 90}))
    figure.update_layout(legend={"orientation": "h", "y": 1.12, "yanchor": "bottom"})
    figure.update_xaxes(title="seconds of training")
    figure.update_yaxes(title="test accuracy", row=1, col=1)
    return figure


if __name__ == "__main__":
    run(main)
