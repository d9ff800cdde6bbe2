"""Claim: a sample costs at most 1.1 times the processor time of the work alone, and less than with
grain, tensorstore, spdl, DALI (on the processor) and PyTorch's DataLoader.

Two sets, made up by seed and in the page cache: JPEGs of 256 x 256, and arrays of 12 x 120 x 120
float32. Each loader in a process of its own, with two threads or processes, in turns; what is not
installed is left out, and said (pip install 'paceline[peers]').
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import SCRIPTS, console, finish, new_table, options, ratio, rounds, run, spread, target
from rich.table import Table

ALONE, OWN = "work alone", "paceline"
PEERS = ("DataLoader, shards", "DataLoader, files", "grain", "spdl", "tensorstore", "DALI")
NOT = {("tensorstore", "images")}
SIDE, COSTS = 256, 1.1


def main() -> None:
    parser = options("loaders", __doc__ or "", repeats=7)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--arrays", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=2, help="of each process, behind the first")
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        console.print("two sets are made up", highlight=False)
        make_datasets(folder, args.images, args.arrays)
        found = measure(folder, args)
    report(args, found)


def make_datasets(folder: Path, images: int, arrays: int) -> None:
    """Write the datasets in each loader's format whose package is installed."""
    from PIL import Image

    from paceline.data import pack

    draw = np.random.default_rng(0)
    for i in range(images):
        path = folder / "images-files" / str(i % 10) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(draw)).save(path, quality=90)
    x = draw.normal(size=(arrays, 12, 120, 120)).astype(np.float32)
    np.save(folder / "arrays.npy", x)
    (folder / "arrays-files").mkdir()
    for i, one in enumerate(x):
        np.save(folder / "arrays-files" / f"{i}.npy", one)
    pack(folder / "images-files", folder / "images", statistics=0)
    pack(x, folder / "arrays", np.arange(arrays), statistics=0)
    try:
        from array_record.python.array_record_module import ArrayRecordWriter
    except ImportError:
        pass
    else:
        for kind, blobs in (
            ("images", [p.read_bytes() for p in sorted((folder / "images-files").rglob("*.jpg"))]),
            ("arrays", [one.tobytes() for one in x]),
        ):
            writer = ArrayRecordWriter(str(folder / f"{kind}.array_record"), "group_size:1")
            for blob in blobs:
                writer.write(blob)
            writer.close()
    try:
        import tensorstore as ts
    except ImportError:
        return
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "arrays.zarr")}}
    chunk = {"name": "regular", "configuration": {"chunk_shape": [1, 12, 120, 120]}}
    metadata = {"chunk_grid": chunk, "data_type": "float32", "shape": list(x.shape)}
    ts.open({**spec, "metadata": metadata}, create=True).result().write(x).result()


def picture(draw: Any) -> Any:
    """Noise of all wavelengths, as photographs have it: the shorter the fainter."""
    from PIL import Image

    whole = np.zeros((SIDE, SIDE, 3), np.float32)
    for power in range(1, 9):
        field = draw.normal(size=(1 << power, 1 << power, 3)) * 48 / power
        for c in range(3):
            layer = Image.fromarray(field[:, :, c].astype(np.float32))
            whole[:, :, c] += np.asarray(layer.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    return np.clip(whole + 128, 0, 255).astype(np.uint8)


def measure(folder: Path, args: Any) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By kind and loader: a median of its epochs for each round."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {"images": {}, "arrays": {}}
    out: set[str] = set()
    for number, turn in enumerate(rounds([ALONE, OWN, *args.peers], args.repeats), 1):
        console.print(f"round {number} of {args.repeats}", highlight=False)
        for kind, loaders in found.items():
            for name in turn:
                if name in out or (name, kind) in NOT:
                    continue
                words = [name, kind, str(folder), str(args.epochs)]
                done = subprocess.run(
                    [sys.executable, str(SCRIPTS / "data/load.py"), *words],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    out.add(name)
                    why = done.stderr.strip().splitlines()[-1:]
                    console.print(f"{name} is left out: {''.join(why)}", highlight=False)
                    continue
                epochs = json.loads(done.stdout.splitlines()[-1])["epochs"]
                one = {key: float(np.median([e[key] for e in epochs])) for key in epochs[0]}
                loaders.setdefault(name, []).append(one)
    return found


def report(args: Any, found: dict[str, Any]) -> None:
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    targets = []
    for kind, loaders in found.items():
        cost = {name: [one["cpu_s"] for one in each] for name, each in loaders.items()}
        medians[kind] = {
            name: {key: spread([one[key] for one in each]) for key in each[0]}
            for name, each in loaders.items()
        }
        ratios[kind] = {
            name: ratio(cost[OWN], each)
            for name, each in cost.items()
            if len(each) == len(cost[OWN])
        }
        claim = f"{kind}: at most {COSTS} times the processor time of the work alone"
        targets.append(target(claim, COSTS, ratios[kind][ALONE]))
        others = [name for name in ratios[kind] if name not in (ALONE, OWN)]
        targets += [target(f"{kind}: less than {x}", 1.0, ratios[kind][x]) for x in others]
        console.print(shown(kind, medians[kind], ratios[kind]))
    finish(args, found, medians, ratios, targets)


def shown(kind: str, medians: dict[str, Any], ratios: dict[str, Any]) -> Table:
    headings = ("", "µs of a processor a sample", "", "samples/s", "paceline's part")
    table = new_table(*headings, title=kind, box=None, pad_edge=False, title_justify="left")
    for name, one in sorted(medians.items(), key=lambda item: item[1]["cpu_s"]["median"]):
        cpu, rate = one["cpu_s"], one["rate"]
        table.add_row(
            name,
            f"{1e6 * cpu['median']:,.0f}",
            f"{1e6 * cpu['q1']:,.0f} to {1e6 * cpu['q3']:,.0f}",
            f"{rate['median']:,.0f}",
            f"{ratios[name]['median']:.2f}" if name in ratios else "",
        )
    return table


if __name__ == "__main__":
    run(main)
