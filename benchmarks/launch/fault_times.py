"""Claim: a failure is reported within 1 second, and training continues within 10 seconds of it.

Two ranks of this machine; rank 1 is killed, raises, or is stopped (SIGSTOP), and the job is started
again once, by `paceline run --max-restarts 1` and by torchrun. Measured from the fault until the
launcher's first word of it, and until the first step of the second attempt has ended. A stopped
rank is noticed by its silence: --hang-timeout for Paceline, the collectives' timeout for torchrun,
both --silence seconds. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its
restarts on gloo mostly fail.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    SCRIPTS,
    Heard,
    console,
    finish,
    new_table,
    options,
    rounds,
    run,
    shown,
    spread,
    target,
)
from rich.progress import track
from start_time import free_port

FAULTS = ("killed", "raised", "stopped")
LAUNCHERS = ("paceline", "torchrun")
WHAT = {"told_s": "reported after, s", "again_s": "training again after, s"}
WORDS = {  # the first of them in a line of the launcher's says that it knows
    "paceline": ("paceline: rank 1", "no rank has made progress"),
    "torchrun": ("failed (exitcode", "Sending process", "will restart worker group"),
}
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or torchrun's on gloo mostly fail
DEATHS = ("killed", "crashed")
CLAIMS = [
    ("told_s", "it is told within 1 s", 1.0),
    ("again_s", "training goes on within 10 s", 10.0),
]
PATIENCE = 120.0  # seconds for a whole run; stands for never


Times = dict[str, dict[str, dict[str, list[float]]]]  # of each fault, launcher, and of WHAT


def main() -> None:
    args = parser("fault_times", __doc__ or "", FAULTS).parse_args()
    times = compared(args, functools.partial(measure, silence=args.silence))
    report("rank 1 was", args, times)


def parser(name: str, what: str, faults: tuple[str, ...]) -> argparse.ArgumentParser:
    found = options(name, what, repeats=7)
    found.add_argument("--silence", type=float, default=5.0)
    found.add_argument("--faults", nargs="+", choices=faults, default=list(faults))
    found.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    return found


def compared(args: argparse.Namespace, measure: Callable[[str, str], dict[str, float]]) -> Times:
    """Each fault under each launcher, in turn. measure: one, as (fault, launcher)."""
    cases = [(fault, launcher) for fault in args.faults for launcher in args.launchers]
    times: Times = {
        fault: {launcher: {what: [] for what in WHAT} for launcher in args.launchers}
        for fault in args.faults
    }
    order = [case for cases_of_round in rounds(cases, args.repeats) for case in cases_of_round]
    for fault, launcher in track(order, "faults", transient=True):
        for what, seconds in measure(fault, launcher).items():
            times[fault][launcher][what].append(seconds)
    return times


def measure(fault: str, launcher: str, silence: float) -> dict[str, float]:
    """Return seconds from the fault; PATIENCE if there was no report, or training ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = {
            "paceline": [
                *("run", "-n", "2", "--max-restarts", "1", "--hang-timeout", str(silence)),
                *("--record", str(folder / "record")),
            ],
            "torchrun": [
                *("--nproc-per-node", "2", "--max-restarts", "1"),
                *("--master-port", str(free_port())),
            ],
        }[launcher]
        process = subprocess.Popen(
            [str(BIN / launcher), *words, *script(fault, folder, launcher, silence)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **RESTARTS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        with Heard([process], WORDS[launcher]) as heard:
            heard.wait(PATIENCE)
        return seconds_of(folder, heard)


def script(fault: str, folder: Path, launcher: str, silence: float) -> list[str]:
    """Its path and arguments: torchrun's ranks notice silence by themselves."""
    timeout = silence if launcher == "torchrun" else 1800.0
    return [str(SCRIPTS / "launch/steps_until_fault.py"), fault, str(folder), str(timeout)]


def seconds_of(folder: Path, heard: Heard) -> dict[str, float]:
    """Return the seconds from the fault to its report, and to the end of the next step."""
    began = float((folder / "fault").read_text())
    told = min((at for at in heard.times if at > began), default=began + PATIENCE)
    again = folder / "again"
    resumed = float(again.read_text()) if again.exists() else began + PATIENCE
    return {"told_s": told - began, "again_s": resumed - began}


def report(heading: str, args: Any, times: Times) -> None:
    headings = (heading, "", *args.launchers)
    title = f"Faults, {args.repeats} rounds: seconds after it, median (quartiles)"
    table = new_table(*headings, title=title)
    medians: dict[str, Any] = {}
    for fault, launchers in times.items():
        medians[fault] = {
            launcher: {what: spread(values) for what, values in found.items()}
            for launcher, found in launchers.items()
        }
        for what, label in WHAT.items():
            cells = [medians[fault][launcher][what] for launcher in args.launchers]
            table.add_row(fault, label, *(shown_time(cell) for cell in cells))
    console.print(table)
    targets = [
        target(
            f"{fault}: {claim}",
            limit,
            times[fault]["paceline"][what],
        )
        for fault in DEATHS
        for what, claim, limit in CLAIMS
        if fault in times
    ]
    finish(args, times, medians, {}, targets)


def shown_time(s: dict[str, float]) -> str:
    if s["median"] >= PATIENCE:
        return "never"
    return shown(s)


if __name__ == "__main__":
    run(main)
