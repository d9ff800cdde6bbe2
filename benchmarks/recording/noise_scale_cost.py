"""Claim: the gradient noise scale costs less than 0.5 % of a step.

A DDP loop on 2 ranks. First Paceline chooses which steps it samples; then every second step is
sampled, and compared with its neighbour. The cost is that of a sampled step, divided by the number
of steps from one sample to the next, plus what the other steps cost.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, console, finish, launch, options, run, spread, target, with_rounds

LIMIT = 0.005


def main() -> None:
    parser = options("noise_scale_cost", __doc__ or "", repeats=8)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank, default 32")
    parser.add_argument("--steps", type=int, default=600, help="before the pairs, default 600")
    parser.add_argument("--pairs", type=int, default=200, help="of a round, default 200")
    args = parser.parse_args()
    found = []
    for number in range(args.repeats):
        with console.status(f"round {number + 1} of {args.repeats}"):
            found.append(measure(args))
    costs = [of_round(ranks) for ranks in found]
    share = with_rounds([one["share"] for one in costs])
    medians = {key: spread([one[key] for one in costs]) for key in costs[0]}
    for key, of in medians.items():
        console.print(f"{key}: {of['median']:.4g} ({of['q1']:.4g} to {of['q3']:.4g})")
    finish(
        args,
        costs,
        medians,
        {"share": share},
        [target("the gradient noise scale: share of a step", LIMIT, share)],
    )


def measure(args: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        words = [SCRIPTS / "recording/noise_steps.py", path, args.batch, args.steps, args.pairs]
        record = ["--record", Path(folder) / "record"]
        command = [BIN / "paceline", "run", "-n", 2, "--threads", 1, *record, *words]
        launch(command)
        return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(2)]


def of_round(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the costs on the rank where they are largest."""
    each = []
    for rank in ranks:
        pairs = zip(rank["sampled_s"], rank["unsampled_s"], strict=True)
        sample_us = 1e6 * statistics.median(a - b for a, b in pairs)
        step_us = 1e6 * statistics.median(rank["unsampled_s"])
        call_us = 1e6 * rank["call_s"]
        cost_us = sample_us / rank["interval"] + call_us
        each.append(
            {
                "share": cost_us / step_us,
                "sample_us": sample_us,
                "call_us": call_us,
                "step_us": step_us,
                "interval": rank["interval"],
            }
        )
    return max(each, key=lambda one: one["share"])


if __name__ == "__main__":
    run(main)
