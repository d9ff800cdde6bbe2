"""Claim: `paceline run --record` costs a step of 3 ms on a GPU at most 1 % of its time.

One rank, a perceptron in bfloat16 with a batch as large as to take 3 ms. Blocks of steps are
recorded and not recorded in turns; "again" is a second block without recording. Measured are a step
launched operator by operator (eager), as a CUDA graph, and compiled by torch.compile. The 20 steps
whose kernels are sampled are left out.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, new_table, ratio, run, spread, target
from on_device import device_options, facts

LIMIT = 1.01
MODES = ("eager", "graph", "compiled")


def main() -> None:
    parser = device_options("gpu_recording_cost", __doc__ or "", repeats=12)
    args = parser.parse_args()
    began = time.time()
    args.machine = facts(args.device)
    is_small = args.quick or args.device == "cpu"
    asked = {
        "device": args.device,
        "modes": MODES if args.device == "cuda" else MODES[:1],
        "width": 128 if is_small else 2048,
        "batch": 32 if is_small else 1024,
        "step_us": 0 if is_small else 3000,
        "steps": 3 if is_small else 30,
        "rounds": 3 if is_small else args.repeats,
        "end": began + args.seconds - 2,  # of time.time()
    }
    found = measured(asked, args.seconds)
    headings = ("step", "batch", "off, µs", "recorded, µs", "recorded / off", "again / off")
    table = new_table(*headings, title="Cost of recording a step on a GPU: medians")
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    targets = []
    for mode, of in found.items():
        if "error" in of:
            console.print(f"{mode}: {of['error']}")
            continue
        for k, what in enumerate(("wall_us", "cpu_us")):
            times = {name: [b[k] for b in blocks] for name, blocks in of["blocks"].items()}
            medians[f"{mode} {what}"] = {name: spread(values) for name, values in times.items()}
            for name in ("recorded", "again"):
                ratios[f"{mode} {what} {name}"] = ratio(times[name], times["off"])
        claim = f"{mode}: a recorded step takes at most {LIMIT} of the time without"
        targets.append(target(claim, LIMIT, ratios[f"{mode} wall_us recorded"]))
        wall = medians[f"{mode} wall_us"]
        table.add_row(
            mode,
            str(of["batch"]),
            *(f"{wall[name]['median']:.0f}" for name in ("off", "recorded")),
            *(f"{ratios[f'{mode} wall_us {n}']['median']:.4f}" for n in ("recorded", "again")),
        )
    console.print(table)
    finish(args, found, medians, ratios, targets)


def measured(asked: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the blocks of each kind of step; those that were measured when the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [str(BIN / "paceline"), "run", "-n", "1", "--record", str(Path(folder) / "record")]
        script = [str(SCRIPTS / "gpu/gpu_steps.py"), str(out), json.dumps(asked)]
        job = subprocess.Popen([*words, *script], start_new_session=True)
        try:
            code = job.wait(seconds)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)
            code = job.wait(20)
        if not out.exists():
            raise SystemExit(f"nothing was measured: exit code {code}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    run(main)
