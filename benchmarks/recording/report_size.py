"""Claim: the report of 1000 ranks with 10,000 events each takes under 10 seconds and 1 GB.

The record is made up: 250 hosts of 4 ranks with one clock, data parallel in one group (or in
groups of --members ranks), steps of about 50 ms with an all-reduce of 4 buckets that starts under
the backward, jitter, and one rank that is slower. Measured is `paceline report FOLDER --json` in a
process of its own, from its start to its end; the memory is the most that it held (VmHWM: mapped
pages of the record count).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import SCRIPTS, console, finish, launch, new_table, options, run, spread, target
from rich.progress import track

from paceline.analyze.records.read_record import EVENT_DTYPE
from paceline.record.ring.ring import (
    DEFAULT_CAPACITY,
    EVENT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
)
from paceline.record.ring.states import Op, State

SECONDS, GIGABYTES = 10.0, 1.0
WHAT = {"seconds": "whole, s", "cpu_seconds": "processor, s", "gigabytes": "peak, GB"}
HOST_RANKS = 4
BUCKETS = 4
BUCKET_BYTES = 25 << 20
MS = 1_000_000  # ns


def step_events(buckets: int = BUCKETS) -> list[State]:
    """The events of one step, in the order of writing."""
    return [
        *(State.INPUT, State.FORWARD, State.LOSS),
        *[State.BLOCKED, State.COLLECTIVE] * buckets,
        *(State.BACKWARD, State.OPTIMIZER, State.STEP),
    ]


STEP = step_events()


def main() -> None:
    parser = options("report_size", __doc__ or "", repeats=3)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=714, help=f"of {len(STEP)} events")
    parser.add_argument("--members", type=int, help="ranks in a process group, default all")
    parser.add_argument("--quick", action="store_true", help="8 ranks, 20 steps: shows it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.steps = 8, 20
    args.members = args.members or args.ranks
    if args.ranks % args.members:
        parser.error("--ranks must be a multiple of --members")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name) / "record"
        folder.mkdir()
        write(folder, args.members, *simulated(args.ranks, args.steps, args.members))
        turns = track(range(args.repeats), "report size", transient=True)
        found = [measure(folder, args) for _ in turns]
    report(args, found)


def simulated(
    ranks: int, steps: int, members: int, buckets: int = BUCKETS
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends (ns) of all events of all steps of all ranks: (events, steps, ranks)."""
    random = np.random.default_rng(0)
    start, end = np.zeros((2, len(step_events(buckets)), steps, ranks), np.int64)
    speed = random.normal(1, 0.02, ranks)
    speed[ranks // 2] *= 1.1
    at = random.integers(0, MS, ranks)  # the end of each rank's last step
    for step in range(steps):
        # input, forward, loss, backward, optimizer
        times = np.array([[2], [12], [0.5], [24], [4]]) * MS * speed
        times *= random.lognormal(0, 0.05, times.shape)
        fetched, forward, loss, computed = at + np.cumsum(times[:4], axis=0).astype(np.int64)
        blocks, launches = [], []
        done, waiting = at, computed
        for bucket in range(1, buckets + 1):
            launched = loss + (computed - loss) * bucket // (buckets + 1)
            last = launched.reshape(-1, members).max(axis=1).repeat(members)
            done = np.maximum(done, last) + int(random.normal(3, 0.2) * MS)
            blocks += [(waiting, np.maximum(waiting + 2000, done))]
            waiting = blocks[-1][1]
            launches += [(launched, waiting)]
        optimized = waiting + times[4].astype(np.int64)
        flights = [event for both in zip(blocks, launches, strict=True) for event in both]
        parts = [(at, fetched), (fetched, forward), (forward, loss), *flights]
        parts += [(loss, waiting), (waiting, optimized), (at, optimized)]
        start[:, step], end[:, step] = zip(*parts, strict=True)
        at = optimized
    return start, end


def write(folder: Path, members: int, start: np.ndarray, end: np.ndarray) -> None:
    """A ring's file for each rank, as docs/reference/formats/record-format.md describes it."""
    kinds, steps, ranks = start.shape
    buckets = (kinds - len(step_events(0))) // 2
    states = np.array(step_events(buckets))
    flight = (states == State.COLLECTIVE) | (states == State.BLOCKED)
    events = np.zeros((steps, kinds), EVENT_DTYPE)
    events["state"], events["peer"] = states, -1
    events["step"] = np.arange(steps)[:, None]
    events["amount"] = np.where(flight, BUCKET_BYTES, np.where(states == State.STEP, 32, 0))
    events["op"], events["group"] = np.where(flight, Op.ALL_REDUCE, 0), flight
    bucket = np.cumsum(states == State.BLOCKED)
    events["seq"] = np.where(flight, np.arange(steps)[:, None] * buckets + bucket, 0)
    began = 10**12
    for rank in range(ranks):
        events["start"] = start[:, :, rank].T + began
        events["end"] = end[:, :, rank].T + began
        meta = {
            "rank": rank,
            "size": ranks,
            "host": f"host-{rank // HOST_RANKS:03}",
            "clock": "one",
            "started_ns": began - 2000 * MS,
            "groups": {
                "1": {"name": str(rank // members), "size": members, "rank": rank % members}
            },
        }
        text = json.dumps(meta).encode()
        capacity = max(DEFAULT_CAPACITY, events.size)
        counts = (HEADER_BYTES, EVENT.size, capacity, events.size, 0, len(text))
        header = HEADER.pack(MAGIC, VERSION, *counts) + text
        data = header.ljust(HEADER_BYTES, b"\0") + events.tobytes()
        (folder / f"rank-{rank}.ring").write_bytes(data)


def measure(folder: Path, args: Any) -> dict[str, Any]:
    """Seconds, gigabytes and the seconds of each part of one report."""
    output, figures = folder.parent / "report.json", folder.parent / "figures.json"
    script = SCRIPTS / "recording/report_parts.py"
    start, end = launch([sys.executable, script, folder, output, figures], OMP_NUM_THREADS="1")
    whole, told = json.loads(output.read_text()), json.loads(figures.read_text())
    assert len(whole["ranks"]) == args.ranks, "the report leaves ranks out"
    assert whole["events"] == args.ranks * args.steps * len(STEP), "the report leaves events out"
    assert not whole["unmatched"], "the report could not match the collectives"
    parts = {**told["parts"], "other": end - start - sum(told["parts"].values())}
    memory = told["peak_bytes"] / 1e9
    cpu = told["cpu_seconds"]
    return {"seconds": end - start, "cpu_seconds": cpu, "gigabytes": memory, "parts": parts}


def report(args: Any, found: list[dict[str, Any]]) -> None:
    rounds = {name: [one[name] for one in found] for name in WHAT}
    by_part = {part: spread([one["parts"][part] for one in found]) for part in found[0]["parts"]}
    medians = {**{name: spread(values) for name, values in rounds.items()}, "parts": by_part}
    events = args.steps * len(STEP)
    headings = ("what", "median (quartiles)")
    title = f"Report of {args.ranks} ranks of {events} events, {args.repeats} rounds"
    table = new_table(*headings, title=title)
    rows = [(label, medians[name]) for name, label in WHAT.items()]
    rows += [(f"  {part}, s", times) for part, times in by_part.items()]
    for what, m in rows:
        table.add_row(what, f"{m['median']:.2f} ({m['q1']:.2f}-{m['q3']:.2f})")
    console.print(table)
    goals = [("seconds", SECONDS), ("gigabytes", GIGABYTES)]
    targets = [
        target(
            f"the report of {args.ranks} ranks of {events} events takes at most {limit:g} {name}",
            limit,
            rounds[name],
        )
        for name, limit in goals
    ]
    finish(args, found, medians, {}, targets)


if __name__ == "__main__":
    run(main)
