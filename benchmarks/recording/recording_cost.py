"""Claim: `paceline run --record` costs a script that knows nothing of it at most 1 % of its steps.

One run of a plain DDP loop on 2 ranks (DataLoader, forward, backward, AdamW; about 5 ms a step
with a core to itself) is recorded and not recorded in turns, block by block of its steps; every
other alternative is compared with the blocks without recording of the same round. "Off, again" is
what the comparison itself makes of nothing; the last alternative is PyTorch's profiler, its start
and stop left out. The processor time of the main thread is the sharper figure: the wall time has
in it what else the machine does. Values are the mean of all ranks' medians of a block.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    SCRIPTS,
    console,
    cost_cells,
    cost_table,
    finish,
    launch,
    options,
    ratio,
    rounds,
    run,
    shown,
    spread,
    target,
)

LIMIT = 1.01
EVENT_US = 3.0
MEANING = {  # in the order of a round: what is compared most closely stands side by side
    "off": "not recorded",
    "recorded": "paceline run --record",
    "again": "not recorded, again",
    "profiler": "torch.profiler, CPU activities",
}
BASE = "off"
TIMES = {"cpu_us": "main thread's time", "wall_us": "wall time"}


def main() -> None:
    parser = options("recording_cost", __doc__ or "", repeats=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="measured steps a block")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank's step")
    parser.add_argument("--quick", action="store_true", help="one rank, 3 steps: shows it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.steps, args.warmup = 1, 3, 1
    order = [name for names in rounds(list(MEANING), args.repeats) for name in names]
    with console.status("recording cost"):
        ranks = measure(order, args)
    report(args, ranks)


def measure(order: list[str], args: Any) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        numbers = [str(number) for number in (args.warmup, args.steps, args.batch)]
        record = ["--record", str(Path(folder) / "record")]
        launch(
            [
                *(str(BIN / "paceline"), "run", "-n", str(args.ranks), *record),
                str(SCRIPTS / "recording/recorded_steps.py"),
                *(str(path), *numbers, json.dumps(order)),
            ],
            OMP_NUM_THREADS="1",
            # Freed memory stays with the process: whether glibc gives it back at every step, to
            # take it again, is the heap's luck, and up to a millisecond.
            MALLOC_TRIM_THRESHOLD_=str(1 << 30),
            MALLOC_MMAP_THRESHOLD_=str(1 << 25),
        )
        return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(args.ranks)]


def by_round(ranks: list[dict[str, Any]], name: str, what: str) -> list[float]:
    """The ranks' mean of what one alternative's blocks had, of each round."""
    blocks = [[block[what] for block in rank["blocks"] if block["name"] == name] for rank in ranks]
    return [statistics.mean(map(middle, together)) for together in zip(*blocks, strict=True)]


def middle(value: Any) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def report(args: Any, ranks: list[dict[str, Any]]) -> None:
    values = {what: {name: by_round(ranks, name, what) for name in MEANING} for what in TIMES}
    ratios = {
        what: {name: ratio(found, of[BASE]) for name, found in of.items()}
        for what, of in values.items()
    }
    event_us = [ns / 1000 for rank in ranks for ns in rank["event_ns"]]
    cpu = values["cpu_us"]
    own = {  # of the recording alone, for each step
        "added_cpu_us": [a - b for a, b in zip(cpu["recorded"], cpu[BASE], strict=True)],
        "told_us": by_round(ranks, "recorded", "told_us"),
        "events": by_round(ranks, "recorded", "events"),
    }
    medians: dict[str, Any] = {
        what: {name: spread(found) for name, found in of.items()} for what, of in values.items()
    }
    medians |= {what: spread(found) for what, found in own.items()} | {"event_us": spread(event_us)}
    show(args, medians, ratios)
    whole = f"recorded, at most {LIMIT} of what it is without"
    targets = [
        target(f"a step's {TIMES[what]}, {whole}", LIMIT, ratios[what]["recorded"])
        for what in TIMES
    ]
    claim = f"an event is written in at most {EVENT_US:g} µs"
    targets.append(target(claim, EVENT_US, event_us))
    finish(args, ranks, medians, ratios, targets)


def show(args: Any, medians: dict[str, Any], ratios: dict[str, Any]) -> None:
    title = (
        f"Cost of recording on {args.ranks} ranks, {args.repeats} rounds of {args.steps} "
        "steps: median (quartiles)"
    )
    table = cost_table(title, "loop", TIMES)
    for name, meaning in MEANING.items():
        cells = cost_cells(name, BASE, medians, ratios)
        table.add_row(meaning, *cells)
    console.print(table)
    console.print(
        f"a step: {shown(medians['events'], 1)} events, main thread's time "
        f"{shown(medians['added_cpu_us'], 0)} µs more; the record says that it cost "
        f"{shown(medians['told_us'], 0)} µs. An event: {shown(medians['event_us'], 2)} µs"
    )


if __name__ == "__main__":
    run(main)
