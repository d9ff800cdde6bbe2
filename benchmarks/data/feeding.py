"""Claim: what `paceline check --data SET` predicts is within 15 % of what loaders read, on sets of
different kinds, from storage and from memory: the median of its rounds on each of them.

The datasets are random. Caches of the host of a virtual machine are not emptied.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, new_table, options, run, spread, target, with_rounds

WITHIN = 0.15
MINE = """
from paceline.data.transforms import Chain, Crop, Flip, Normalise

augmented = Chain(Flip(), Crop((224, 224)), Normalise([120, 115, 105], [60, 58, 59]))
"""
SETS: dict[str, list[str]] = {
    "photographs, packed": ["photographs"],
    "photographs, a file each": ["files"],
    "photographs, augmented": ["photographs", "--transform", "mine:augmented"],
    "arrays of 691 kB, packed": ["arrays"],
    "signals of 1 kB, packed": ["signals"],
    "HDF5, chunks of 16, gzip": ["tiles.h5:x", "--labels", "y"],
}


def main() -> None:
    parser = options("feeding", __doc__ or "", repeats=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the storage that is meant; default: here")
    args = parser.parse_args()
    found: dict[str, list[float]] = {}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in SETS}
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        console.print("making the datasets", highlight=False)
        make_datasets(Path(folder))
        for number in range(1, args.repeats + 1):
            console.print(f"round {number} of {args.repeats}", highlight=False)
            for name, words in list(SETS.items())[:: -1 if number % 2 else 1]:
                answer = run_check(Path(folder), words, args.ranks)
                seen[name].append(answer)
                for state, rates in answer["rates"].items():
                    (now,) = (one for one in rates if one["ranks"] == args.ranks)
                    off = abs(now["samples_s"] / answer["measured"][state] - 1)
                    found.setdefault(f"{name}, from {state}", []).append(off)
    args.folder = str(args.folder or "")
    report(args, found, seen)


def make_datasets(folder: Path) -> None:
    import h5py
    from PIL import Image

    from paceline.data import pack

    draw = np.random.default_rng(0)
    for i in range(3000):
        path = folder / "files" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8))
        rough.resize((256, 256)).save(path, quality=90)
    pack(folder / "files", folder / "photographs", statistics=0)
    x = draw.normal(size=(1500, 12, 120, 120)).astype(np.float32)
    pack(x, folder / "arrays", np.arange(1500), statistics=0)
    pack(draw.normal(size=(60_000, 256)).astype(np.float32), folder / "signals", statistics=0)
    tiles = np.round(draw.normal(size=(12_000, 4, 64, 64)), 1).astype(np.float32)
    with h5py.File(folder / "tiles.h5", "w") as file:
        file.create_dataset("x", data=tiles, chunks=(16, 4, 64, 64), compression="gzip")
        file["y"] = np.arange(len(tiles)) % 10
    (folder / "mine.py").write_text(MINE)


def run_check(folder: Path, words: list[str], ranks: int) -> dict[str, Any]:
    command = [str(BIN / "paceline"), "check", "--json", "-n", f"{ranks}", "--data", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def report(args: Any, found: dict[str, list[float]], seen: Any) -> None:
    medians = {name: spread(values) for name, values in found.items()}
    table = new_table("", "off, %", "worst", "measured/s", "limited by", box=None, pad_edge=False)
    for name, one in medians.items():
        kind, state = name.rsplit(", from ", 1)
        rates = [t for t in seen[kind] if state in t["rates"]]
        measured = spread([t["measured"][state] for t in rates])["median"]
        limits = {r["limit"] for t in rates for r in t["rates"][state] if r["ranks"] == args.ranks}
        row = (f"{100 * one['median']:.0f}", f"{100 * one['high']:.0f}", f"{measured:,.0f}")
        table.add_row(name, *row, ", ".join(sorted(limits)))
    console.print(table)
    ratios = {name: with_rounds(values) for name, values in found.items()}
    targets = [target(f"{name}: off by", WITHIN, one) for name, one in ratios.items()]
    finish(args, found, medians, ratios, targets, seen=seen)


if __name__ == "__main__":
    run(main)
