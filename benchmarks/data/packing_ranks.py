"""What `paceline pack -n` gains over the threads of one process, on this machine.

Arrays are packed with `--apply` of a function that holds the interpreter's lock (Python's own
arithmetic) and of one that gives it back (a sort of numpy's), and images are made smaller without
any; each by the threads of one process and by ranks, in turns. The time is the whole of packing,
with the start of the ranks. Every set is compared with the first one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, new_table, options, ratio, rounds, run, spread, target

THREADS = "threads"
MINE = """
import numpy as np

def holds(x):
    total = 0
    for value in range({turns}):
        total += value * value % 7
    return x + total % 2

def gives_back(x):
    many = np.tile(x.ravel(), {times})
    many.sort()
    return x + many[0] * 0
"""
WORK: dict[str, tuple[str, list[str]]] = {
    "a function that holds the lock": ("x.npy", ["--apply", "mine:holds"]),
    "a function that gives it back": ("x.npy", ["--apply", "mine:gives_back"]),
    "images made smaller": ("images", ["--resize", "64"]),
}
HOLDS, LIMIT = next(iter(WORK)), 0.65


def main() -> None:
    parser = options("packing_ranks", __doc__ or "", repeats=7)
    parser.add_argument("--ranks", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--ms", type=float, default=10.0, help="of a sample's function, about")
    args = parser.parse_args()
    ways = {THREADS: [], f"{args.ranks} ranks": ["-n", str(args.ranks)]}
    found: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in ways} for kind in WORK}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        console.print("the sources are made", highlight=False)
        make_sources(folder, args)
        for number, turn in enumerate(rounds(list(ways), args.repeats), 1):
            console.print(f"round {number} of {args.repeats}", highlight=False)
            for kind in WORK:
                for way in turn:
                    found[kind][way].append(time_packing(folder, kind, ways[way]))
    report(args, found)


def make_sources(folder: Path, args: Any) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    np.save(folder / "x.npy", draw.normal(size=(args.samples, 32, 32)).astype(np.float32))
    (folder / "images").mkdir()
    for i in range(args.samples):
        rough = Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8))
        rough.resize((512, 512)).save(folder / "images" / f"{i:06}.jpg", quality=90)
    text = MINE.format(turns=int(args.ms * 20_000), times=max(int(args.ms * 12), 1))
    (folder / "mine.py").write_text(text)


def time_packing(folder: Path, kind: str, where: list[str]) -> float:
    """Return the seconds of one packing."""
    source, words = WORK[kind]
    first, dest = folder / f"first-{list(WORK).index(kind)}", folder / "packed"
    command = [BIN / "paceline", "pack", *where, source, dest.name, *words, "--json"]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nexit code {done.returncode} of {kind}")
    if first.exists():
        assert bytes_of(first) == bytes_of(dest), "ranks and threads have packed other samples"
        shutil.rmtree(dest)
    else:
        dest.rename(first)
    return float(json.loads(done.stdout)["seconds"])


def bytes_of(folder: Path) -> bytes:
    """Return the bytes of all samples, in their order."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("shard-*.bin")))


def report(args: Any, found: dict[str, dict[str, list[float]]]) -> None:
    medians = {kind: {way: spread(x) for way, x in ways.items()} for kind, ways in found.items()}
    ratios: dict[str, Any] = {}
    headings = ("", "by", "s: median (quartiles)", "samples/s", "of threads' time")
    title = f"{args.samples:,} samples"
    table = new_table(*headings, title=title, box=None, pad_edge=False, title_justify="left")
    for kind, ways in found.items():
        for way, seconds in ways.items():
            of = ratio(seconds, ways[THREADS])
            m = medians[kind][way]
            table.add_row(
                kind if way == THREADS else "",
                way,
                f"{m['median']:.2f} ({m['q1']:.2f} to {m['q3']:.2f})",
                f"{args.samples / m['median']:,.0f}",
                "" if way == THREADS else f"{of['median']:.2f} ({of['q1']:.2f} to {of['q3']:.2f})",
            )
            if way != THREADS:
                ratios[kind] = of
    claim = f"{HOLDS}: {args.ranks} ranks take at most {LIMIT} of what threads take"
    targets = [target(claim, LIMIT, ratios[HOLDS])]
    console.print(table)
    finish(args, found, medians, ratios, targets)


if __name__ == "__main__":
    run(main)
