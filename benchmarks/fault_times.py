"""Claim: a death is told within 1 second, and training goes on within 10 seconds of it.

Two ranks of this machine; rank 1 is killed, raises, or is stopped (SIGSTOP), and the job is started
again once, by `paceline run --max-restarts 1` and by torchrun. Measured from the fault until the
launcher's first word of it, and until the first step of the second attempt has ended. A stopped
rank is noticed by its silence: --hang-timeout for Paceline, the collectives' timeout for torchrun,
both --silence seconds. torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its
restarts on gloo mostly fail.
"""

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import BIN, SCRIPTS, console, finish, machine, options, rounds, run, spread, target
from rich.progress import track
from rich.table import Table
from start_time import free_port

FAULTS = ("killed", "raised", "stopped")
LAUNCHERS = ("paceline", "torchrun")
WHAT = {"told_s": "told after, s", "again_s": "training again after, s"}
WORDS = {  # the first of them in a line of the launcher's says that it knows
    "paceline": ("paceline: rank 1", "has begun or ended anything"),
    "torchrun": ("failed (exitcode", "Sending process", "will restart worker group"),
}
PATIENCE = 120.0  # seconds for a whole run; stands for never


def main() -> None:
    parser = options("fault_times", __doc__ or "", repeats=7)
    parser.add_argument("--silence", type=float, default=5.0)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    args = parser.parse_args()
    facts = machine()
    cases = [(fault, launcher) for fault in args.faults for launcher in LAUNCHERS]
    times: dict[str, dict[str, dict[str, list[float]]]] = {
        fault: {launcher: {what: [] for what in WHAT} for launcher in LAUNCHERS}
        for fault in args.faults
    }
    order = [case for cases_of_round in rounds(cases, args.repeats) for case in cases_of_round]
    for fault, launcher in track(order, "faults", transient=True):
        for what, seconds in measure(fault, launcher, args.silence).items():
            times[fault][launcher][what].append(seconds)
    report(args, facts, times)


def measure(fault: str, launcher: str, silence: float) -> dict[str, float]:
    """Seconds from the fault; PATIENCE where it was never told, or training never went on."""
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
        timeout = silence if launcher == "torchrun" else 1800.0
        script = [str(SCRIPTS / "steps_until_fault.py"), fault, str(folder), str(timeout)]
        told = heard([str(BIN / launcher), *words, *script], WORDS[launcher])
        began = float((folder / "fault").read_text())
        again = folder / "again"
        resumed = float(again.read_text()) if again.exists() else began + PATIENCE
        return {"told_s": min(told - began, PATIENCE), "again_s": resumed - began}


def heard(command: list[str], words: tuple[str, ...]) -> float:
    """Run a command to its end; when one of the words was first in what it wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    first = float("inf")
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if first == float("inf") and any(word in line for word in words):
                first = time.monotonic()
        process.wait()
    finally:
        late.cancel()
        if process.poll() is None:
            process.terminate()
            process.wait()
    return first


def report(args: Any, facts: dict[str, Any], times: dict[str, Any]) -> None:
    table = Table(title=f"Faults, {args.repeats} rounds: seconds after it, median (quartiles)")
    for heading in ("rank 1 was", "", *LAUNCHERS):
        table.add_column(heading, justify="right" if heading in LAUNCHERS else "left")
    medians: dict[str, Any] = {}
    for fault, launchers in times.items():
        medians[fault] = {
            launcher: {what: spread(values) for what, values in found.items()}
            for launcher, found in launchers.items()
        }
        for what, label in WHAT.items():
            cells = [medians[fault][launcher][what] for launcher in LAUNCHERS]
            table.add_row(fault, label, *(shown(cell) for cell in cells))
    console.print(table)
    claims = [("killed", "told_s", "a death is told within 1 s", 1.0)]
    claims += [("killed", "again_s", "training goes on within 10 s of a death", 10.0)]
    targets = [
        target(
            claim,
            limit,
            {"rounds": times[fault]["paceline"][what], **medians[fault]["paceline"][what]},
        )
        for fault, what, claim, limit in claims
        if fault in times
    ]
    finish(
        "fault_times",
        args,
        facts,
        measurements=times,
        medians=medians,
        ratios={},
        targets=targets,
    )


def shown(s: dict[str, float]) -> str:
    if s["median"] >= PATIENCE:
        return "never"
    return f"{s['median']:.2f} ({s['q1']:.2f}-{s['q3']:.2f})"


if __name__ == "__main__":
    run(main)
