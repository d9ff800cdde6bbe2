"""Claims: after kills of the runner at random moments no trial is lost and none runs to its end
twice, deterministic trials have the same final ranking, and the study goes on within 5 s.

The runner is killed with -9 and continued, again and again, until the number of kills is reached;
then the study is completed. Every second time it is killed a random time after its start, which may
be before a trial runs; the other times a random time after the study went on. The time until it
goes on is that from the start of the command until the launcher of a trial runs.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, machine, options, run, spread, target

GOES_ON_LIMIT_S = 5.0
MAX_LIFE_S = 6.0  # of a runner that is killed at any moment
MAX_RUN_S = 2.0  # of one that is killed after the study went on
START_TIMEOUT_S = 120.0
SCRIPT = """
import sys, time
from paceline.tune import report
x = float(sys.argv[1])
for step in range(1, 4):
    time.sleep(0.1)
    report(-(x - 1) ** 2 * (1 + 1 / step), step)
"""
STUDY = """
[study]
command = "trial.py {{x}}"
metric = "score"
goal = "max"
trials = {trials}
search = "random"
[parameters.x]
low = -3.0
high = 3.0
"""


def main() -> None:
    parser = options("kills", __doc__ or "", repeats=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        (folder / "trial.py").write_text(SCRIPT)
        (folder / "study.toml").write_text(STUDY.format(trials=args.trials))
        delays, killed = kill_often(folder, args.kills, random.Random(args.seed))
        console.print(f"killed {killed} times; now to the end")
        study = complete(folder)
        lost, twice = check(folder, study, args.trials)
    report(args, facts, delays, lost, twice)


def kill_often(folder: Path, kills: int, draw: random.Random) -> tuple[list[float], int]:
    """Kill the runner; return the seconds until the study went on, where it was seen, and the
    number of kills.
    """
    delays, killed = [], 0
    for number in range(kills):
        before = attempts(folder)
        began = time.monotonic()
        process = start(folder, continued=(folder / "study.journal").exists())
        life = draw.uniform(0.0, MAX_LIFE_S) if number % 2 else START_TIMEOUT_S
        until, seen = began + life, None
        while time.monotonic() < until and process.poll() is None:
            if seen is None and attempts(folder) > before:
                seen = time.monotonic() - began
                delays.append(seen)
                until = time.monotonic() + draw.uniform(0.0, MAX_RUN_S)
            time.sleep(0.01)
        if process.poll() is not None:
            if process.returncode:
                raise RuntimeError(f"kill {number}: exit code {process.returncode}")
            break  # the study is complete
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
    return delays, killed


def attempts(folder: Path) -> int:
    return sum(1 for _ in folder.glob("study.trials/*/attempt-*.out"))


def start(folder: Path, continued: bool) -> "subprocess.Popen[bytes]":
    words = [str(BIN / "paceline"), "tune", "study.toml"]
    words += ["--continue"] if continued and has_study(folder) else []
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(words, cwd=folder, stdout=output, stderr=output)


def has_study(folder: Path) -> bool:
    return b'"op_code":0' in (folder / "study.journal").read_bytes()


def complete(folder: Path) -> dict[str, Any]:
    words = [str(BIN / "paceline"), "tune", "study.toml", "--continue", "--json=out.json"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def check(folder: Path, study: dict[str, Any], trials: int) -> tuple[int, int]:
    """Return the numbers of trials that are lost or wrong, and that ran to their end twice."""
    lost = abs(trials - len(study["trials"]))
    twice = 0
    for one in study["trials"]:
        expected = -((one["parameters"]["x"] - 1) ** 2) * (1 + 1 / 3)
        lost += one["state"] != "complete" or abs(one["values"][0] - expected) > 1e-12
        ends = (folder / f"study.trials/{one['number']:05}").glob("attempt-*.end")
        twice += sum(json.loads(end.read_text())["code"] == 0 for end in ends) > 1
    drawn = {one["parameters"]["x"] for one in study["trials"]}
    lost += trials - len(drawn)  # a point that was drawn twice
    return lost, twice


def report(args: Any, facts: dict[str, Any], delays: list[float], lost: int, twice: int) -> None:
    console.print(f"{lost} trials lost or wrong, {twice} ran to their end twice")
    console.print(f"the study went on after {statistics.median(delays):.2f} s (median)")
    measured = {"goes_on_s": delays, "lost": [float(lost)], "twice": [float(twice)]}
    claims = (
        ("no trial is lost or has another value", 0.0, "lost"),
        ("no trial runs to its end twice", 0.0, "twice"),
        ("a killed study goes on within 5 s", GOES_ON_LIMIT_S, "goes_on_s"),
    )
    targets = [
        target(
            claim,
            limit,
            {"rounds": measured[name], **spread(measured[name])},
            counted=name != "goes_on_s",
        )
        for claim, limit, name in claims
    ]
    finish(
        "kills",
        args,
        facts,
        measurements=measured,
        medians={name: spread(values) for name, values in measured.items()},
        ratios={},
        targets=targets,
    )


if __name__ == "__main__":
    run(main)
