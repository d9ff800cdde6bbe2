"""Claims: with shuffle="blocks" and a cold cache a packed set is read at 0.6 of the rate of
reading its files from start to end, or more; the first batch of a million samples is there within
0.3 s; and a rank's memory does not grow with the index.

Cold: the kernel drops the files' pages from the page cache before each epoch, unless other
processes use them. Caches of the storage itself are not emptied.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    console,
    finish,
    new_table,
    options,
    ratio,
    rounds,
    run,
    spread,
    target,
    with_rounds,
)

RATE, FIRST_S = 0.6, 0.3
CHUNK = 4 << 20
FIRST = """
import json, resource, sys, time
from paceline.data import Loader
import torch
began = time.perf_counter()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
next(iter(Loader(sys.argv[1], 64, shuffle=True)))
took = time.perf_counter() - began
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"first_s": took, "grown_mib": grown / 1024}))
"""


def main() -> None:
    parser = options("loader_storage", __doc__ or "", repeats=7)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the first batch's set")
    parser.add_argument("--folder", type=Path, help="on the storage that is meant; default: here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as name:
        folder = Path(name)
        console.print("two sets are packed", highlight=False)
        make_datasets(folder, args)
        found = measure(folder, args.repeats)
    args.folder = str(args.folder or "")
    report(args, found)


def make_datasets(folder: Path, args: Any) -> None:
    from paceline.data import pack

    draw = np.random.default_rng(0)
    each = 110_000  # bytes, as a photograph for training has

    def photographs() -> Any:
        for i in range(args.megabytes * 1_000_000 // each):
            yield draw.integers(0, 256, each, np.uint8), i

    pack(photographs(), folder / "large", statistics=0)
    pack(np.zeros((args.samples, 4), np.float32), folder / "many", statistics=0)


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    ways = {"from start to end": read_sequentially, "blocks": lambda f: epoch(f, "blocks")}
    ways["all mixed"] = lambda f: epoch(f, True)
    found: dict[str, list[float]] = {name: [] for name in (*ways, "first_s", "grown_mib")}
    for number, turn in enumerate(rounds(list(ways), repeats), 1):
        console.print(f"round {number} of {repeats}", highlight=False)
        for name in turn:
            evict_pages(folder / "large")
            began = time.perf_counter()
            size = ways[name](folder / "large")
            found[name].append(size / (time.perf_counter() - began))
        words = [sys.executable, "-c", FIRST, str(folder / "many")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        for name, value in json.loads(done.stdout).items():
            found[name].append(value)
    return found


def evict_pages(folder: Path) -> None:
    for path in folder.glob("shard-*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_sequentially(folder: Path) -> int:
    """Read the files from start to end, a large piece at a time."""
    size, piece = 0, bytearray(CHUNK)
    for path in sorted(folder.glob("shard-*.bin")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                size += count
    return size


def epoch(folder: Path, shuffle: Any) -> int:
    from paceline.data import Loader

    return sum(x.nbytes for x, _ in Loader(folder, 64, shuffle, num_workers=2))


def report(args: Any, found: dict[str, list[float]]) -> None:
    medians = {name: spread(values) for name, values in found.items()}
    plain = found["from start to end"]
    ratios = {name: ratio(plain, found[name]) for name in ("blocks", "all mixed")}
    ratios["first_s"] = with_rounds(found["first_s"])
    table = new_table("", "MB/s", "", "of start to end", box=None, pad_edge=False)
    for name in ("from start to end", "blocks", "all mixed"):
        one = medians[name]
        part = 1 / ratios[name]["median"] if name in ratios else 1.0
        quartiles = f"{one['q1'] / 1e6:,.0f} to {one['q3'] / 1e6:,.0f}"
        table.add_row(name, f"{one['median'] / 1e6:,.0f}", quartiles, f"{part:.2f}")
    console.print(table)
    console.print(
        f"first batch of {args.samples:,} samples: {medians['first_s']['median']:.3f} s, and "
        f"{medians['grown_mib']['median']:.0f} MiB more of memory"
    )
    claim = (
        f"blocks: at most {1 / RATE:.2f} times as long as from start to end ({RATE} of its rate)"
    )
    targets = [
        target(claim, 1 / RATE, ratios["blocks"]),
        target("first batch of a million, s", FIRST_S, ratios["first_s"]),
    ]
    finish(args, found, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
