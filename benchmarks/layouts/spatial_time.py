"""Claim: a 3-D U-Net on half of a volume takes at most 0.58 of the step of one rank with the whole
volume, with one thread each, keeps at most half of the activations and 5 %, and waits for halos in
at most 5 % of its step.

Both train in the same processes, in turns. Memory is what a forward leaves for its backward, in
bytes of PyTorch's allocator. With one sample, PyTorch computes many layers of the whole volume
without oneDNN (``parallel/spatial/convolution.py``); with two samples it uses oneDNN for all.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    OUT,
    console,
    finish,
    new_table,
    on_ranks,
    options,
    ratio,
    result_of,
    spread,
    target,
)

STEP_LIMIT, MEMORY_LIMIT, EXPOSED_LIMIT = 0.58, 0.525, 0.05


def main() -> None:
    parser = options("spatial_time", __doc__ or "", repeats=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[48, 64])
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    found = {
        f"{count} x {size}^3": measure(size, args.width, args.repeats, count)
        for count in args.samples
        for size in args.sizes
    }
    headings = (
        *(
            *("samples", "whole, s", "half, s", "of whole", "of its processor time", "exposed"),
            *("no overlap", "kept, MiB", "of whole"),
        ),
    )
    table = new_table(*headings, title=f"Step of a 3-D U-Net, {args.repeats} rounds")
    medians, results, targets = {}, {}, []
    for size, of in found.items():
        times, memory = of["step_s"], of["kept_bytes"]
        step = ratio(times["parts"], times["whole"])
        share = memory["parts"] / memory["whole"]
        processor = ratio(of["processor_s"]["parts"], of["processor_s"]["whole"])
        exposed = ratio(of["exposed_s"]["parts"], times["parts"])
        waiting = ratio(times["waiting"], times["parts"])
        medians[size] = {kind: spread(times[kind]) for kind in ("whole", "parts")}
        table.add_row(
            size,
            *(f"{one['median']:.3f}" for one in medians[size].values()),
            f"{step['median']:.2f}",
            f"{processor['median']:.2f}",
            f"{exposed['median']:.1%}",
            f"{waiting['median']:.2f}",
            f"{memory['whole'] / 2**20:.0f}",
            f"{share:.2f}",
        )
        results[size] = {"step": step, "processor": processor, "memory": share}
        results[size] |= {"exposed": exposed, "waiting": waiting}
        targets.append(target(f"step of halves of {size}, of the whole", STEP_LIMIT, step))
        targets.append(target(f"halos exposed of {size}, of the step", EXPOSED_LIMIT, exposed))
        peak = [share]
        targets.append(target(f"memory of halves of {size}, of the whole", MEMORY_LIMIT, peak))
    console.print(table)
    finish(args, found, medians, results, targets)


def measure(size: int, width: int, rounds: int, samples: int) -> dict[str, Any]:
    given = ["--size", size, "--width", width, "--rounds", rounds, "--samples", samples]
    command = on_ranks(2, "layouts/spatial_steps.py", OUT, *given)
    return dict(result_of(command, OMP_NUM_THREADS="1"))


if __name__ == "__main__":
    main()
