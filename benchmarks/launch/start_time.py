"""Claim: with `paceline run`, training begins in at most 0.6 of the time that torchrun takes.

Measured from just before the command is started to the end of the first training step, and to
the end of the command. Both run the same script, scripts/launch/first_step.py.
"""

import socket
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
    new_table,
    options,
    ratio,
    rounds,
    run,
    shown,
    spread,
    target,
)
from rich.progress import track

LIMIT = 0.6
WHAT = ("first_step_s", "command_s")


def main() -> None:
    parser = options("start_time", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    launchers = ["paceline", "torchrun"]
    cases = [(ranks, launcher) for ranks in args.ranks for launcher in launchers]
    for launcher in launchers:  # the files of torch are in memory from here on
        measure(launcher, args.ranks[0])
    times: dict[str, dict[str, dict[str, list[float]]]] = {
        str(ranks): {launcher: {what: [] for what in WHAT} for launcher in launchers}
        for ranks in args.ranks
    }
    order = [case for cases_of_round in rounds(cases, args.repeats) for case in cases_of_round]
    for ranks, launcher in track(order, "start time", transient=True):
        for what, seconds in zip(WHAT, measure(launcher, ranks), strict=True):
            times[str(ranks)][launcher][what].append(seconds)
    report(args, times)


def measure(launcher: str, ranks: int) -> tuple[float, float]:
    """Seconds until the first step has ended, and until the command has."""
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "first-step"
        words = {
            "paceline": ["run", "-n", str(ranks)],
            "torchrun": ["--nproc-per-node", str(ranks), "--master-port", str(free_port())],
        }[launcher]
        start, end = launch(
            [str(BIN / launcher), *words, str(SCRIPTS / "launch/first_step.py"), str(stamp)],
            OMP_NUM_THREADS="1",
        )
        return float(stamp.read_text()) - start, end - start


def free_port() -> int:
    """torchrun's own, 29500, may be another job's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def report(args: Any, times: dict[str, Any]) -> None:
    headings = ("ranks", "seconds until", "paceline run", "torchrun", "ratio by round")
    table = new_table(*headings, title=f"Start-up, {args.repeats} rounds: median (quartiles)")
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for ranks, launchers in times.items():
        medians[ranks] = {
            launcher: {what: spread(values) for what, values in measured.items()}
            for launcher, measured in launchers.items()
        }
        ratios[ranks] = {
            what: ratio(launchers["paceline"][what], launchers["torchrun"][what]) for what in WHAT
        }
        for what, label in zip(WHAT, ("end of the first step", "end of the command"), strict=True):
            cells = [medians[ranks][launcher][what] for launcher in launchers]
            table.add_row(ranks, label, *map(shown, cells), shown(ratios[ranks][what]))
    console.print(table)
    targets = [
        target(
            f"until the first step on {ranks} ranks, at most {LIMIT} of torchrun's time",
            LIMIT,
            ratios[ranks]["first_step_s"],
        )
        for ranks in times
    ]
    finish(args, times, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
