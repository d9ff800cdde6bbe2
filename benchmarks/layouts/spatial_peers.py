"""Claim: beside PhysicsNeMo's ShardTensor on two ranks, Paceline computes more layers of divided
samples rightly, and a step of a 3-D U-Net that both can run takes no longer and no more memory.

Layers are float64: output, gradients and running statistics against one rank. Steps are float32,
on one thread a rank, in processes that take turns; a round is the median of some steps. Memory is
bytes of PyTorch's allocator without parameters and inputs. PyTorch computes small convolutions of
one volume without oneDNN (``parallel/spatial/convolution.py``), which Paceline avoids; for two
samples both use oneDNN. ShardTensor needs an environment of its own, with the version of PyTorch of
this one:

    python3 -m venv /tmp/peers
    /tmp/peers/bin/pip install nvidia-physicsnemo==2.2.2 torch==2.13.0 torchvision==0.28.0
    python benchmarks/layouts/spatial_peers.py --python /tmp/peers/bin/python

It takes 3 minutes. Without ``--python`` only Paceline runs.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    OUT,
    SCRIPTS,
    console,
    finish,
    new_table,
    options,
    ratio,
    result_of,
    rounds,
    run,
    spread,
    target,
)
from rich.table import Table

SCRIPT = str(SCRIPTS / "layouts/spatial_peer.py")
EXACT, CLOSE = 1e-12, 1e-7  # relative differences of float64
LIMIT_S = 150  # of one start of ShardTensor
MEASURES = {"step_s": "step", "kept_bytes": "bytes kept for backward", "peak_bytes": "most bytes"}
Found = dict[str, dict[str, dict[str, list[Any]]]]  # by samples, implementation and measure


def main() -> None:
    parser = options("spatial_peers", __doc__ or "", repeats=6)
    parser.add_argument("--python", help="interpreter of ShardTensor's environment")
    parser.add_argument("--size", type=int, default=32, help="of a volume, default 32")
    parser.add_argument("--width", type=int, default=8, help="channels of the U-Net, default 8")
    parser.add_argument("--steps", type=int, default=4, help="of a round, default 4")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2], help="default 1 2")
    args = parser.parse_args()
    names = ["paceline", "shardtensor"] if args.python else ["paceline"]
    layers = {name: measure(args, name, "layers") for name in names}
    found: Found = {}
    words = [f"--{one}={getattr(args, one)}" for one in ("size", "width", "steps")]
    words += ["--samples", *map(str, args.samples)]
    for turn in rounds(names, args.repeats):
        for name in turn:
            for samples, of in measure(args, name, "steps", *words).items():
                for key, value in of.items():
                    found.setdefault(samples, {}).setdefault(name, {}).setdefault(key, []).append(
                        value
                    )
    report(args, layers, found)


def measure(args: Any, name: str, what: str, *words: str) -> dict[str, Any]:
    """Run one implementation in processes of its own, and return what it writes."""
    launcher = ["timeout", "-k", "10", LIMIT_S, args.python]
    if name == "paceline":
        launcher = [BIN / "paceline", "run", "-n", 2]
    elif what == "steps":
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", 2]
    command = [*launcher, SCRIPT, OUT, name, what, *words]
    return dict(result_of(command, OMP_NUM_THREADS="1"))


def verdict(of: dict[str, Any]) -> str:
    if "error" in of:
        return "refused or failed"
    if of["difference"] <= EXACT:
        return "right"
    return "right to 1e-7" if of["difference"] <= CLOSE else "wrong"


def report(args: Any, layers: dict[str, Any], found: Found) -> None:
    """Print the tables and the reasons, and write the JSON."""
    verdicts = {name: [verdict(of) for of in one["layers"]] for name, one in layers.items()}
    show_layers(layers, verdicts)
    medians = {
        samples: {name: {key: spread(one[key]) for key in MEASURES} for name, one in names.items()}
        for samples, names in found.items()
    }
    headings = ("samples", "", "step, ms", "kept, MiB", "most, MiB")
    table = new_table(*headings, title=f"3-D U-Net on two ranks: medians of {args.repeats} rounds")
    for samples, names in medians.items():
        for name, one in names.items():
            sizes = [f"{one[key]['median'] / 2**20:.2f}" for key in ("kept_bytes", "peak_bytes")]
            table.add_row(samples, name, f"{one['step_s']['median'] * 1e3:.1f}", *sizes)
    console.print(table)
    refused = sum(one != "right" for one in verdicts["paceline"])
    targets = [
        target("layers and networks that Paceline does not compute rightly", 0, [refused], True)
    ]
    ratios: dict[str, Any] = {}
    if "shardtensor" in verdicts:
        right = [Counter(verdicts[name])["right"] for name in ("shardtensor", "paceline")]
        targets.append(
            target(
                "right layers and networks, ShardTensor / Paceline",
                1.0,
                [right[0] / right[1]],
                True,
            )
        )
        for samples, names in found.items():
            ratios[samples] = {}
            for key, what in MEASURES.items():
                of = ratio(names["paceline"][key], names["shardtensor"][key])
                ratios[samples][key] = of
                claim = f"{what}, {samples}, Paceline / ShardTensor"
                targets.append(target(claim, 1.0, of))
    measurements = {"layers": layers, "verdicts": verdicts, "steps": found}
    finish(args, measurements, medians, ratios, targets)


def show_layers(layers: dict[str, Any], verdicts: dict[str, list[str]]) -> None:
    table = Table("layer", "shape", *layers, title="Layers and networks in float64 on two ranks")
    for number, of in enumerate(layers["paceline"]["layers"]):
        shape = " x ".join(map(str, of["shape"]))
        table.add_row(of["layer"], shape, *(one[number] for one in verdicts.values()))
    console.print(table)
    for name, one in verdicts.items():
        counts = ", ".join(f"{count} {what}" for what, count in Counter(one).items())
        versions = ", ".join(
            f"{what} {version}" for what, version in layers[name]["versions"].items()
        )
        console.print(f"{name} ({versions}): {counts}", highlight=False)
        for of in layers[name]["layers"]:
            if "error" in of:
                console.print(f"  {of['layer']}: {of['error']}", markup=False, highlight=False)


if __name__ == "__main__":
    run(main)
