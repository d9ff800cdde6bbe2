"""What it costs that ranks agree on which parameters they used: steps of DDP with and without the
search for unused parameters, and all-reduces of DDP's map (an int32 a parameter) and of as many
bits. Claim: the map takes at most a hundredth of a step, so that bits in its place would save less.

Two hosts of two ranks, Linux namespaces of this machine (tests/bed), their links narrowed with tc.

    python benchmarks/exchange/unused.py      as root, after make test-packages
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BENCHMARKS, BIN, SCRIPTS, console, finish, machine, options, ratio, run, spread
from common import target as judged
from exchange_hosts import narrowed
from rich.table import Table

sys.path.insert(0, str(BENCHMARKS.parent / "tests"))
sys.path.insert(0, str(BENCHMARKS.parent / "tests/support"))
from bed import Hosts, missing

HOSTS = "host1:2,host2:2"
SHARE = 0.01
PARAMETERS = (120, 1200, 12_000)
WAYS = {"plain": "DDP", "search": "find_unused_parameters", "static": "static_graph"}


def main() -> None:
    parser = options("unused", __doc__ or "", repeats=15)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10, help="of one measurement")
    args = parser.parse_args()
    if missing():
        sys.exit(f"this needs {', '.join(missing())}. HINT: make test-packages, and run as root")
    facts = machine()
    with contextlib.closing(Hosts(2)) as hosts:
        narrowed(hosts, args.mbit)
        folder = hosts.new_folder()
        shutil.copy(SCRIPTS / "exchange/unused.py", folder)
        command = [BIN / "paceline", "run", "--fresh", "-H", HOSTS, "--exchange", "paceline"]
        command += ["--env", f"PACELINE_LINK_MBIT={args.mbit}"]  # the interfaces don't know of tc
        command += ["unused.py", folder / "found.json", "--rounds", args.repeats]
        command += ["--steps", args.steps, "--parameters", *PARAMETERS]
        hosts.run("host0", *command, cwd=folder, timeout=1800)
        found = dict(json.loads((folder / "found.json").read_text()))
    report(args, facts, found)


def report(args: Any, facts: Any, found: dict[str, list[float]]) -> None:
    medians = {name: spread(each) for name, each in found.items()}
    table = Table(title=f"DDP of 120 parameters on two hosts of two ranks, {args.mbit} Mbit/s")
    for heading in ("", "ms", "low", "high"):
        table.add_column(heading, justify="right" if heading else "left")
    named = {f"map {n}": f"its map of {n:,} parameters" for n in PARAMETERS}
    named |= {f"bits {n}": f"as many bits, {n:,}" for n in PARAMETERS}
    for name, words in {**WAYS, **named}.items():
        cells = (f"{1e3 * medians[name][key]:.2f}" for key in ("median", "low", "high"))
        table.add_row(words, *cells)
    console.print(table)
    ratios = {name: ratio(found[name], found["plain"]) for name in ("search", "static")}
    ratios |= {f"map {n}": ratio(found[f"map {n}"], found[f"bits {n}"]) for n in PARAMETERS}
    share = ratio(found[f"map {PARAMETERS[0]}"], found["search"])
    claims = [judged("DDP's map of 120 parameters, of a step", SHARE, share)]
    finish(
        "unused", args, facts,
        measurements=found, medians=medians, ratios=ratios, targets=claims,
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
