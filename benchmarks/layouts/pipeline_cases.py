"""Claim: none of the cases of pipelines is wrong in silence.

Two stages on two ranks (three for a skip connection) train each case with Paceline and with
torch.distributed.pipelining (traced, GPipe, four micro-batches): right, wrong (without an error),
or an error. It takes a minute.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, options, run, target, with_rounds
from rich.table import Table

CASES = {
    "plain": "two batches of 8 samples",
    "skip": "a skip connection across a stage (three stages)",
    "tied": "weights that both stages use",
    "norm": "batch normalization",
    "uneven": "7 samples in 4 micro-batches",
    "changing": "8 samples, then 6",
    "dictionary": "two inputs by name",
    "frozen": "a stage without trained parameters",
    "evaluation": "an evaluation before training",
}
SIDES = ("paceline", "torch")
LIMIT_S = 90


def main() -> None:
    parser = options("pipeline_cases", __doc__ or "", repeats=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    found: dict[str, Any] = {
        case: {side: outcome(side, case) for side in SIDES} for case in args.cases
    }
    table = Table("case", *SIDES, title="Cases of pipelines")
    for case, sides in found.items():
        table.add_row(CASES[case], *(sides[side]["outcome"] for side in SIDES))
    console.print(table)
    wrong = [float(sum(of["paceline"]["outcome"] != "right" for of in found.values()))]
    ratios = {"cases that are not right": with_rounds(wrong)}
    targets = [
        target("cases that Paceline does not train right", 0.0, ratios["cases that are not right"])
    ]
    finish(args, found, {}, ratios, targets)


def outcome(side: str, case: str) -> dict[str, str]:
    """Return how a case ends, and the last line of an error."""
    script = str(SCRIPTS / "layouts/pipeline_case.py")
    ranks = "3" if case == "skip" else "2"
    launcher = {
        "paceline": [str(BIN / "paceline"), "run", "-n", ranks],
        "torch": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", ranks],
    }[side]
    try:
        done = subprocess.run(
            [*launcher, script, side, case],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "hangs"}
    for line in done.stdout.splitlines():
        if "outcome " in line and not done.returncode:
            return {"outcome": line.split("outcome ", 1)[1].strip()}
    later = ("ChildFailedError", "Connection closed", "Connection reset")  # of the other ranks
    lines = [line for line in done.stderr.splitlines() if "Error: " in line]
    errors = [line for line in lines if not any(word in line for word in later)] or lines
    return {"outcome": "error", "error": errors[-1].strip()[:200] if errors else ""}


if __name__ == "__main__":
    run(main)
