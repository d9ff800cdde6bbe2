"""Claim: with horovod.keras and horovod.tensorflow a step takes at most 1.10 of a peer's.

The network is Keras' CNN for images of 28 x 28. With the PyTorch backend the peer is DDP, with the
TensorFlow backend MultiWorkerMirroredStrategy. Both train in own loops, in the same processes, in
alternate blocks of steps (scripts/compat/keras_steps.py). The exchange's own share is printed. It
needs TensorFlow: ``make test-frameworks`` makes an environment.
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
    run,
    shown,
    spread,
    target,
)

LIMIT = 1.10
PEERS = {"torch": "ddp", "tensorflow": "mirrored strategy"}


def main() -> None:
    parser = options("keras", __doc__ or "", repeats=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--backends", nargs="+", choices=list(PEERS), default=list(PEERS))
    args = parser.parse_args()
    times = {backend: measure(backend, args) for backend in args.backends}
    headings = ("backend", "horovod", "peer", "of the peer", "exchange alone")
    title = f"Milliseconds a step, {args.repeats} rounds: median (quartiles)"
    table = new_table(*headings, title=title)
    medians, ratios, targets = {}, {}, []
    for backend, found in times.items():
        peer = PEERS[backend]
        medians[backend] = {name: spread(values) for name, values in found.items()}
        ratios[backend] = ratio(found["horovod"], found[peer])
        alone = spread(found["exchange alone"])
        share = alone["median"] / spread(found["horovod"])["median"]
        table.add_row(
            backend, shown(spread(found["horovod"]), scale=1e3),
            f"{peer}: {shown(spread(found[peer]), scale=1e3)}",
            f"{ratios[backend]['median']:.3f}", f"{alone['median'] * 1e3:.2f} ({share:.0%})",
        )  # fmt: skip
        targets.append(target(f"{backend}: a step, of that of {peer}", LIMIT, ratios[backend]))
    console.print(table)
    finish(args, times, medians, ratios, targets)


def measure(backend: str, args: Any) -> dict[str, list[float]]:
    """Run one job, and return the times of its blocks."""
    words = ["--rounds", args.repeats, "--steps", args.steps, "--out", OUT]
    found: dict[str, list[float]] = result_of(
        on_ranks(args.ranks, "compat/keras_steps.py", *words),
        OMP_NUM_THREADS="1",
        KERAS_BACKEND=backend,
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    return found


if __name__ == "__main__":
    run(main)
