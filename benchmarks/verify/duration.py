"""Claim: `paceline verify` of a script with steps of 50 ms answers within two minutes on two cores.

The script, scripts/verify/steady.py, validates and saves checkpoints, so that verify makes all of
its runs: N ranks, two replays, one rank alone, an interrupted and a resumed run. Its step time is
measured first, on one rank with one thread. The CPU time of all processes shows how much of a
duration is other work on the machine.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, options, rounds, run, spread, target

LIMIT_S = 120.0
SCRIPT = SCRIPTS / "verify" / "steady.py"


def main() -> None:
    parser = options("duration", __doc__ or "", repeats=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    step_s = measure_step()
    console.print(f"a step on one core takes {1000 * step_s:.1f} ms")
    times: dict[str, list[float]] = {str(ranks): [] for ranks in args.ranks}
    cpu_times: dict[str, list[float]] = {str(ranks): [] for ranks in args.ranks}
    for of_round in rounds(args.ranks, args.repeats):
        for ranks in of_round:
            before = cpu_s()
            seconds = measure(ranks)
            times[str(ranks)].append(seconds)
            cpu_times[str(ranks)].append(cpu_s() - before)
            console.print(f"{ranks} ranks: {seconds:.1f} s, {cpu_times[str(ranks)][-1]:.1f} s CPU")
    targets = [
        target(f"verify of {ranks} ranks within {LIMIT_S:.0f} s", LIMIT_S, values)
        for ranks, values in times.items()
    ]
    medians: dict[str, Any] = {ranks: spread(values) for ranks, values in times.items()}
    measured = {"step_s": step_s, "seconds": times, "cpu_seconds": cpu_times}
    finish(args, measured, medians, {}, targets)


def cpu_s() -> float:
    """Return the CPU time of all commands so far, with the processes that they have started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_step() -> float:
    """Return the shortest time of a step on one rank with one thread, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        words = [str(BIN / "paceline"), "run", "-n", "1", "--threads", "1"]
        end_of([*words, str(SCRIPT), "--epochs", "1", "--time", str(out)], folder, codes=(0,))
        return float(json.loads(out.read_text()))


def measure(ranks: int) -> float:
    """Return the duration of a verification, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        words = [str(BIN / "paceline"), "verify", "-n", str(ranks), "--json", str(answer)]
        seconds = end_of([*words, str(SCRIPT)], folder, codes=(0, 1))
        found = json.loads(answer.read_text())
        if not found["compared"]["replayed"]:
            raise SystemExit(f"nothing was replayed: {found['not_seen']}")
        return seconds


def end_of(words: list[str], folder: str, codes: tuple[int, ...]) -> float:
    """Run a command in a folder; return its duration in seconds.

    Raises:
        SystemExit: Its exit code is none of ``codes``.
    """
    start = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=os.environ, capture_output=True, text=True)
    if done.returncode not in codes:
        raise SystemExit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}: {words}")
    return time.monotonic() - start


if __name__ == "__main__":
    run(main)
