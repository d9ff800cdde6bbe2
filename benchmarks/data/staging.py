"""Claim: `paceline stage` takes at most 1.2 times as long as `cp` of the same shards, and less than
`cp -r` of the same samples as files; from a cold and a warm cache, to a disk and to memory.

One packed dataset of random bytes. Stage compares each shard with its checksum, which cp does not.
The measured time ends with the command, before the disk has written everything. Stage is called in
this process; cp is a program of its own.

Cold: the kernel drops the files' pages from the page cache before each copy, unless other processes
use them. Caches of the storage itself are not emptied.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, new_table, options, ratio, rounds, run, spread, target

MOST = 1.2
STAGE, CP, FILES = "paceline stage", "cp, the shards", "cp -r, a file a sample"
WAYS = (STAGE, CP, FILES)


def main() -> None:
    parser = options("staging", __doc__ or "", repeats=7)
    parser.add_argument("--megabytes", type=int, default=1500)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the set is; default: here")
    parser.add_argument(
        "--to", type=Path, nargs="+", help="default: the folder where the set is, and /dev/shm"
    )
    args = parser.parse_args()
    where = args.folder or Path.cwd()
    to = args.to or [where, Path("/dev/shm")]
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        console.print("a set is packed", highlight=False)
        make_dataset(folder, args.megabytes * 1_000_000 // args.samples, args.samples)
        found = measure(folder, to, args.repeats)
    args.folder, args.to = str(args.folder or ""), [str(one) for one in to]
    report(args, found)


def make_dataset(folder: Path, each: int, samples: int) -> None:
    """Write a dataset as files, a thousand to a folder, and pack it."""
    from paceline.data import pack

    draw = np.random.default_rng(0)
    for i in range(samples):
        path = folder / "files" / f"{i // 1000:03}" / f"{i:06}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.bytes(each))
    pack(folder / "files", folder / "packed", statistics=0)


def measure(folder: Path, to: list[Path], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by destination and cache, and by way."""
    cases = [(place, state) for place in to for state in ("cold", "warm")]
    found: dict[str, dict[str, list[float]]] = {
        case_name(place, state): {way: [] for way in WAYS} for place, state in cases
    }
    for number in range(repeats):
        console.print(f"round {number + 1} of {repeats}", highlight=False)
        for place, state in cases:
            for way in rounds(list(WAYS), repeats)[number]:
                took = time_copy(way, folder, place, state == "cold")
                found[case_name(place, state)][way].append(took)
    return found


def case_name(place: Path, state: str) -> str:
    return f"to {place}, {state} cache"


def time_copy(way: str, folder: Path, place: Path, cold: bool) -> float:
    from paceline.data.staging.stage import stage

    source = folder / ("files" if way == FILES else "packed")
    (evict_pages if cold else read_pages)(source)
    with tempfile.TemporaryDirectory(dir=place) as name:
        os.sync()  # what an earlier one has left to write
        began = time.perf_counter()
        if way == STAGE:
            stage(source, name)
        else:
            subprocess.run(["cp", "-r", str(source), name], check=True)
        took = time.perf_counter() - began
        check_copied(way, source, Path(name))
        shutil.rmtree(name)
        Path(name).mkdir()
    return took


def check_copied(way: str, source: Path, to: Path) -> None:
    """Exit if the copy has other bytes than its source."""
    sizes = [
        sum(p.stat().st_size for p in below.rglob("[!.]*") if p.is_file()) for below in (to, source)
    ]
    if len(set(sizes)) != 1:
        raise SystemExit(f"{way} has copied {sizes[0]:,} bytes of {sizes[1]:,}")


def evict_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pages(folder: Path) -> None:
    piece = bytearray(4 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass


def report(args: Any, found: dict[str, Any]) -> None:
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    targets = []
    table = new_table("", "s", "", "MB/s", "of cp", box=None, pad_edge=False)
    for case, ways in found.items():
        medians[case] = {way: spread(each) for way, each in ways.items()}
        ratios[case] = {way: ratio(each, ways[CP]) for way, each in ways.items()}
        part = ratio(ways[STAGE], ways[FILES])
        ratios[case]["stage, of cp -r"] = part
        targets.append(target(f"{case}: at most {MOST} times cp", MOST, ratios[case][STAGE]))
        targets.append(target(f"{case}: less than cp -r of files", 1.0, part))
        table.add_row(f"[bold]{case}[/]")
        for way, one in medians[case].items():
            table.add_row(
                f"  {way}",
                f"{one['median']:.2f}",
                f"{one['q1']:.2f} to {one['q3']:.2f}",
                f"{args.megabytes / one['median']:,.0f}",
                f"{ratios[case][way]['median']:.2f}",
            )
    console.print(table)
    finish(args, found, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
