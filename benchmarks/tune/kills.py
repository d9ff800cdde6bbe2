"""Claims: after kills of the runner at random moments no trial is lost and none runs to its end
twice, deterministic trials have the same final ranking, and the study goes on within 5 s.

The runner is killed with -9 and continued, again and again, until the number of kills is reached;
then the study is completed. In turn it is killed a random time after its start, which may be before
a trial runs; a random time after the study went on; and a random time after a trial has reported,
while it trains. The time until it goes on is that from the start of the command until the launcher
of a trial runs.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, options, run, spread, target

GOES_ON_LIMIT_S = 5.0
MAX_LIFE_S = 6.0  # of a runner that is killed at any moment
MAX_RUN_S = 2.0  # of one that is killed after the study went on
START_TIMEOUT_S = 120.0
STEPS, STEP_S = 5, 0.1  # of a trial
WAYS = ("started", "went on", "trains")  # after which the time until a kill begins
SCRIPT = f"""
import sys, time
from paceline.tune import report
x = float(sys.argv[1])
for step in range(1, {STEPS} + 1):
    time.sleep({STEP_S})
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
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        (folder / "trial.py").write_text(SCRIPT)
        (folder / "study.toml").write_text(STUDY.format(trials=args.trials))
        killed = kill_often(folder, args.kills, random.Random(args.seed))
        console.print(f"killed {killed.count} times; now to the end")
        study = complete(folder)
        lost, twice = check(folder, study, args.trials)
    report(args, killed, lost, twice)


@dataclass
class Killed:
    """What was seen of the runners that were killed.

    Attributes:
        count: Number of kills.
        training: Number of kills while a trial trained: it had reported, and not its last step.
        delays: Seconds until the study went on, where it was seen.
    """

    count: int = 0
    training: int = 0
    delays: list[float] = field(default_factory=list)


def kill_often(folder: Path, kills: int, draw: random.Random) -> Killed:
    """Kill the runner, until the study is complete at the latest."""
    killed = Killed()
    for number in range(kills):
        before = attempts(folder)
        began = time.monotonic()
        process = start(folder, continued=(folder / "study.journal").exists())
        way = WAYS[number % len(WAYS)]
        until = began + (draw.uniform(0.0, MAX_LIFE_S) if way == "started" else START_TIMEOUT_S)
        goes_on, is_set = False, way == "started"
        while time.monotonic() < until and process.poll() is None:
            new = attempts(folder) - before
            if new and not goes_on:
                goes_on = True
                killed.delays.append(time.monotonic() - began)
            if not is_set and new and (way == "went on" or any(map(is_training, new))):
                is_set = True
                most = MAX_RUN_S if way == "went on" else (STEPS - 1) * STEP_S
                until = time.monotonic() + draw.uniform(0.0, most)
            time.sleep(0.01)
        if process.poll() is not None:
            if process.returncode:
                raise RuntimeError(f"kill {number}: exit code {process.returncode}")
            break  # the study is complete
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed.count += 1
        killed.training += any(map(is_training, attempts(folder) - before))
    return killed


def attempts(folder: Path) -> set[Path]:
    return {path.with_suffix("") for path in folder.glob("study.trials/*/attempt-*.out")}


def is_training(attempt: Path) -> bool:
    """Return whether an attempt at a trial has reported, and not its last step."""
    reports = attempt.with_suffix(".reports")
    return reports.exists() and 0 < reports.read_bytes().count(b"\n") < STEPS


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
        expected = -((one["parameters"]["x"] - 1) ** 2) * (1 + 1 / STEPS)
        lost += one["state"] != "complete" or abs(one["values"][0] - expected) > 1e-12
        ends = (folder / f"study.trials/{one['number']:05}").glob("attempt-*.end")
        twice += sum(json.loads(end.read_text())["code"] == 0 for end in ends) > 1
    drawn = {one["parameters"]["x"] for one in study["trials"]}
    lost += trials - len(drawn)  # a point that was drawn twice
    return lost, twice


def report(args: Any, killed: Killed, lost: int, twice: int) -> None:
    console.print(f"{lost} trials lost or wrong, {twice} ran to their end twice")
    console.print(f"{killed.training} kills while a trial trained")
    console.print(f"the study went on after {statistics.median(killed.delays):.2f} s (median)")
    measured = {
        "goes_on_s": killed.delays,
        "lost": [float(lost)],
        "twice": [float(twice)],
        "kills": [float(killed.count)],
        "kills_in_training": [float(killed.training)],
    }
    claims = (
        ("no trial is lost or has another value", 0.0, "lost"),
        ("no trial runs to its end twice", 0.0, "twice"),
        ("a killed study goes on within 5 s", GOES_ON_LIMIT_S, "goes_on_s"),
    )
    targets = [
        target(
            claim,
            limit,
            measured[name],
            counted=name != "goes_on_s",
        )
        for claim, limit, name in claims
    ]
    finish(args, measured, {name: spread(values) for name, values in measured.items()}, {}, targets)


if __name__ == "__main__":
    run(main)
