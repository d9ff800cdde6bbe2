"""Claim: `paceline pack` is at least as fast as the writers of webdataset, streaming (MDS),
TFRecord and ArrayRecord, each of them in its fastest way, on JPEGs, arrays and small files.

Three sets, made up by seed and in the page cache: JPEGs of 256 x 256 in class folders (a thousand
different ones), arrays of 12 x 120 x 120 float32 in a .npy, and texts of about 2 kB, a file each.
All write the samples with their classes, uncompressed, in shards of 256 MiB; the time ends when
what was written is on its storage, which pack sees to by itself. Peers write as their
documentation shows, in a loop, and also with threads that read ahead of it, or with processes
where the documentation has them. What pack does beside, the others do not: random order,
checksums, and by default the mean and deviation of 4,096 samples, for which they are decoded; so
it is compared without those, and shown with them as well. Each in a process of its own, in turns,
once on a few samples before; what is not installed is left out, and said (pip install
'paceline[peers]'; for streaming see there).
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
from loaders import picture
from rich.table import Table

PLAIN, OWN, SAME = "plain copy", "paceline", "paceline, no statistics"
PEERS = ("webdataset", "streaming", "TFRecord", "ArrayRecord")
WAYS = ("", ", read ahead", ", processes")
DIFFERENT, FEW = 1000, 16
KINDS = {"images": "JPEGs of 256 x 256", "arrays": "arrays of 691 kB", "texts": "files of 2 kB"}


def main() -> None:
    parser = options("packing", __doc__ or "", repeats=7)
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--arrays", type=int, default=1500)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="default: memory, not a disk"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        console.print("three sets are made up", highlight=False)
        made(folder, args)
        found = measure(folder, args)
    args.folder = str(args.folder)
    report(args, found)


def made(folder: Path, args: Any) -> None:
    draw = np.random.default_rng(0)
    images(folder, args.images, draw)
    x = draw.normal(size=(args.arrays, 12, 120, 120)).astype(np.float32)
    for name, count in (("arrays", args.arrays), ("few-arrays", FEW)):
        np.save(folder / f"{name}.npy", x[:count])
        np.save(folder / f"{name}-labels.npy", np.arange(len(x[:count])) % 10)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     \n", np.uint8)
    for i in range(args.texts):
        text = letters[draw.integers(0, 32, draw.integers(1500, 2500))].tobytes()
        kept(folder, "texts", i, ".txt", text)


def images(folder: Path, count: int, draw: Any) -> None:
    import io

    from PIL import Image

    different = []
    for _ in range(min(count, DIFFERENT)):
        made = io.BytesIO()
        Image.fromarray(picture(draw)).save(made, "JPEG", quality=90)
        different.append(made.getvalue())
    for i in range(count):
        kept(folder, "images", i, ".jpg", different[i % DIFFERENT])


def kept(folder: Path, kind: str, i: int, end: str, data: bytes) -> None:
    for name in (kind, f"few-{kind}") if i < FEW else (kind,):
        path = folder / name / f"class-{i % 10}" / f"{i:06}{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def measure(folder: Path, args: Any) -> dict[str, dict[str, list[dict[str, float]]]]:
    """By kind and writer: seconds and bytes of each round."""
    ways = [peer + way for peer in args.peers for way in WAYS]
    ways = [way for way in ways if not way.endswith(WAYS[2]) or way.startswith("streaming")]
    found: dict[str, dict[str, list[dict[str, float]]]] = {kind: {} for kind in KINDS}
    out: set[str] = set()
    for number, turn in enumerate(rounds([PLAIN, OWN, SAME, *ways], args.repeats), 1):
        console.print(f"round {number} of {args.repeats}", highlight=False)
        for name in turn:
            if name in out:
                continue
            words = [sys.executable, str(SCRIPTS / "data/write.py"), name, str(folder), *KINDS]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                out.add(name)
                why = done.stderr.strip().splitlines()[-1:]
                console.print(f"{name} is left out: {''.join(why)}", highlight=False)
                continue
            for kind, one in json.loads(done.stdout.splitlines()[-1]).items():
                found[kind].setdefault(name, []).append(one)
    return found


def report(args: Any, found: dict[str, Any]) -> None:
    medians: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    targets = []
    for kind, writers in found.items():
        times = {name: [one["s"] for one in each] for name, each in writers.items()}
        times = {name: each for name, each in times.items() if len(each) == len(times[OWN])}
        medians[kind] = {
            name: {key: spread([one[key] for one in each]) for key in each[0]}
            for name, each in writers.items()
        }
        ratios[kind] = {
            own: {name: ratio(times[own], each) for name, each in times.items()}
            for own in (PLAIN, OWN, SAME)
        }
        best = [fastest(peer, times) for peer in args.peers]
        best = sorted((one for one in best if one), key=lambda name: spread(times[name])["median"])
        for name in best:
            claim = f"{KINDS[kind]}, without statistics: no longer than {name}"
            targets.append(target(claim, 1.0, ratios[kind][SAME][name]))
        for name in best[:1]:
            claim = f"{KINDS[kind]}, as it is by default: no longer than {name}"
            targets.append(target(claim, 1.0, ratios[kind][OWN][name]))
        count = getattr(args, kind)
        console.print(shown(f"{count:,} {KINDS[kind]}", count, medians[kind], ratios[kind]))
    finish(args, found, medians, ratios, targets)


def fastest(peer: str, times: dict[str, list[float]]) -> str:
    """Of a peer's ways; "" where it is not there."""
    ways = [name for name in times if name.partition(",")[0] == peer]
    return min(ways, key=lambda name: spread(times[name])["median"], default="")


def shown(title: str, count: int, medians: dict[str, Any], ratios: dict[str, Any]) -> Table:
    headings = ("", "s", "", "samples/s", "MB/s", "of plain copy", "paceline's part*")
    table = new_table(*headings, title=title, box=None, pad_edge=False, title_justify="left")
    for name, one in sorted(medians.items(), key=lambda item: item[1]["s"]["median"]):
        took = one["s"]
        table.add_row(
            name,
            f"{took['median']:.3f}",
            f"{took['q1']:.3f} to {took['q3']:.3f}",
            f"{count / took['median']:,.0f}",
            f"{one['bytes']['median'] / took['median'] / 1e6:,.0f}",
            f"{1 / ratios[PLAIN][name]['median']:.2f}" if name in ratios[PLAIN] else "",
            f"{ratios[SAME][name]['median']:.2f}" if name in ratios[SAME] else "",
        )
    table.caption = "* of the time, without statistics"
    return table


if __name__ == "__main__":
    run(main)
