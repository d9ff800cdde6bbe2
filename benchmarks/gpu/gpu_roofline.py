"""Claim: the rates that `paceline check` measures are within 60 and 102 % of the data sheet.

The matrix products and the triad of `paceline check`, against the data sheet of the card: NVIDIA
H100 SXM: dense bfloat16 989 TFLOP/s, HBM3 3.35 TB/s; H200: the same arithmetic, 4.8 TB/s. Other
cards are measured, and not compared.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, new_table, run, spread, target, with_rounds
from on_device import device_options, facts

from paceline.study.probe.measure.device_speed import arithmetic, triad

HOPPER = {
    "float64": 67e12,  # tensor cores
    "float32": 67e12,
    "tf32": 494.7e12,
    "float16": 989.4e12,
    "bfloat16": 989.4e12,
}
SHEETS = {  # FLOP/s by precision, bytes/s
    "NVIDIA H100 80GB HBM3": (HOPPER, 3.35e12),
    "NVIDIA H200": (HOPPER, 4.8e12),
}
LEAST, MOST = 0.6, 1.02


def main() -> None:
    parser = device_options("gpu_roofline", __doc__ or "", repeats=3)
    args = parser.parse_args()
    args.machine = facts(args.device)
    device = "cuda:0" if args.device == "cuda" else "cpu"
    name = args.machine.get("gpu", {}).get("name", "")
    flops, bandwidth = SHEETS.get(name, ({}, None))
    each = 0.02 if args.quick else min(0.8, args.seconds / args.repeats / 14)
    rounds: list[dict[str, float]] = []
    began = time.perf_counter()
    for number in range(1 if args.quick else args.repeats):
        spent = time.perf_counter() - began
        if number and spent * (number + 1) / number > args.seconds:
            break
        found = {
            f"{one.operation}, {one.precision}": one.rate.median for one in arithmetic(device, each)
        }
        found["triad"] = triad(device, each).triad.median
        rounds.append(found)
    sheet: dict[str, Any] = {f"matrix product, {k}": v for k, v in flops.items()}
    if bandwidth:
        sheet["triad"] = bandwidth
    headings = ("work", "measured, 10^12/s", "data sheet", "share")
    table = new_table(*headings, title=f"Measured rates of {name or 'the CPU'}")
    medians, ratios, targets = {}, {}, []
    for key in rounds[0]:
        values = [one[key] for one in rounds]
        medians[key] = spread(values)
        cells = ["", ""]
        if key in sheet:
            shares = [value / sheet[key] for value in values]
            ratios[key] = with_rounds(shares)
            cells = [f"{sheet[key] / 1e12:.2f}", f"{ratios[key]['median']:.3f}"]
            off = [max(share / MOST, LEAST / share) for share in shares]
            claim = f"{key}: {LEAST:.0%} to {MOST:.0%} of the data sheet"
            targets.append(target(claim, 1.0, off))
        table.add_row(key, f"{medians[key]['median'] / 1e12:.3f}", *cells)
    console.print(table)
    finish(args, rounds, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
