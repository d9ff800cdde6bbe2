"""Compare the steps of zero1, zero2 and zero3 with DeepSpeed's ZeRO and with megatron-fsdp.

The same model, batch and optimizer on two ranks. Each of them trains in processes of its own, which
take turns; a round is the median of some steps. The others need an environment of their own:

    python3 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch deepspeed megatron-fsdp
    python benchmarks/layouts/peers.py --python /tmp/peers/bin/python

DeepSpeed computes on the CPU (DS_ACCELERATOR=cpu), exchanges in shared memory by an operator that
it compiles at its first start, and uses the same fused Adam. A peer that does not run is listed
with the error that ended it. It takes 4 minutes.
"""

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

PEERS = ("deepspeed", "megatron-fsdp")
LIMIT_S = 150  # of one start of a peer
LAYOUTS = ("zero1", "zero2", "zero3")


def main() -> None:
    parser = options("peers", __doc__ or "", repeats=3)
    parser.add_argument("--python", help="interpreter of the peers' environment")
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    names = ["paceline", *(args.peers if args.python else ())]
    found: dict[str, dict[str, Any]] = {name: {"step_s": {}, "error": ""} for name in names}
    for turn in rounds(names, args.repeats):
        for name in turn:
            if not found[name]["error"]:
                measure(args, name, found[name])
    report(args, found)


def measure(args: Any, name: str, found: dict[str, Any]) -> None:
    """Add the seconds of a step by layout, or the reason why there are none."""
    words = [SCRIPTS / "layouts/peer_steps.py", OUT, name, args.width, args.batch]
    command = [BIN / "paceline", "run", "-n", args.ranks, *words]
    if name != "paceline":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", args.ranks]
        command = ["timeout", "-k", "10", LIMIT_S, args.python, *torchrun, *words]
    try:
        by_layout = result_of(command, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    except SystemExit as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reasons = [line for line in lines if "Error" in line.split(":")[0] and ": " in line]
        ended = f"did not end within {LIMIT_S} s" if "exit code 124 " in str(error) else ""
        found["error"] = ended or (reasons or lines or ["failed"])[0]
        return
    for layout, seconds in by_layout.items():
        found["step_s"].setdefault(layout, []).append(seconds)


def report(args: Any, found: dict[str, dict[str, Any]]) -> None:
    """Print the table and the reasons, and write the JSON."""
    table = new_table(
        "", *LAYOUTS, title=f"Milliseconds of a step on {args.ranks} ranks, and Paceline's / theirs"
    )
    own, ratios, targets = found["paceline"]["step_s"], {}, []
    for name, one in found.items():
        if one["error"]:
            console.print(f"{name} does not run: {one['error']}", markup=False)
            continue
        cells = []
        for layout in LAYOUTS:
            shown = f"{spread(one['step_s'][layout])['median'] * 1e3:.1f}"
            if name != "paceline":
                against = ratio(own[layout], one["step_s"][layout])
                ratios[f"{layout}, paceline / {name}"] = against
                targets.append(target(f"step of {layout} not longer than {name}'s", 1.0, against))
                shown += f" ({against['median']:.2f})"
            cells.append(shown)
        table.add_row(name, *cells)
    console.print(table)
    medians = {
        name: {layout: spread(times) for layout, times in one["step_s"].items()}
        for name, one in found.items()
    }
    finish(args, found, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
