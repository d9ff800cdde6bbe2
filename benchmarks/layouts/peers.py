"""Step time and memory of ZeRO-1 to 3 by Paceline, DeepSpeed and megatron-fsdp, on CPU ranks.

Each alternative trains the same model in processes of its own, in interleaved rounds. The peers run
in an environment of their own (--python), which has PyTorch and them:

    python -m venv PEERS
    PEERS/bin/pip install torch deepspeed megatron-fsdp
    python benchmarks/layouts/peers.py --python PEERS/bin/python

A peer that does not run is listed with its error.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, launch, machine, options, ratio, run, spread
from rich.table import Table

OWN = "paceline"
PEERS = ("deepspeed", "megatron-fsdp")
LAYOUTS = ("zero1", "zero2", "zero3")
# no CUDA; no compilation of DeepSpeed's own kernel for the exchange in shared memory
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = options("peers", __doc__ or "", repeats=5)
    parser.add_argument("--python", type=Path, help="interpreter that has the peers")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    args = parser.parse_args()
    facts = machine()
    measurements: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in args.layouts}
    errors: dict[str, str] = {}
    names = [OWN, *(args.peers if args.python else [])]
    for number in range(args.repeats):
        for layout in args.layouts:
            for name in names[:: -1 if number % 2 else 1]:
                if f"{name} {layout}" in errors:
                    continue
                try:
                    found = measure(args, name, layout)
                    measurements[layout].setdefault(name, []).append(found)
                except SystemExit as error:
                    errors[f"{name} {layout}"] = last_error(str(error))
    report(args, facts, measurements, errors)


def measure(args: Any, name: str, layout: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        script = str(SCRIPTS / "layouts/peer_steps.py")
        words = [script, str(out), name, layout]
        words += ["--width", str(args.width), "--batch", str(args.batch)]
        if name == OWN:
            start = [str(BIN / "paceline"), "run", "-n", str(args.ranks)]
        else:
            start = [str(args.python), "-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(args.ranks)]
        launch([*start, *words], **ENVIRONMENT)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def last_error(text: str) -> str:
    """Return the last line that names an error in the output of a failed run."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line]
    own = [line for line in lines if "ChildFailedError" not in line]
    return (own or lines or ["unknown"])[-1][-300:]


def report(
    args: Any,
    facts: dict[str, Any],
    measurements: dict[str, dict[str, list[dict[str, Any]]]],
    errors: dict[str, str],
) -> None:
    table = Table(title=f"{args.ranks} ranks, {args.repeats} rounds")
    for heading in ("layout", "by", "step (s)", f"step / {OWN}", "peak (MiB)"):
        table.add_column(heading)
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for layout, of in measurements.items():
        seconds = {
            name: [statistics.median(one["step_s"]) for one in each] for name, each in of.items()
        }
        for name, values in seconds.items():
            key, peaks = f"{layout} {name}", [one["peak_bytes"] for one in of[name]]
            medians[key] = {"step_s": spread(values), "peak_bytes": spread(peaks)}
            shown = "1"
            if name != OWN and OWN in seconds:
                ratios[key] = ratio(values, seconds[OWN])
                shown = f"{ratios[key]['median']:.2f}"
            peak = f"{medians[key]['peak_bytes']['median'] / (1 << 20):.0f}"
            table.add_row(layout, name, f"{medians[key]['step_s']['median']:.4f}", shown, peak)
    console.print(table)
    for key, error in errors.items():
        console.print(f"{key}: {error}", markup=False)
    if args.python is not None:
        args.python = str(args.python)
    more = {"medians": medians, "ratios": ratios, "targets": [], "errors": errors}
    finish("peers", args, facts, measurements=measurements, **more)


if __name__ == "__main__":
    run(main)
