"""All-reduces in one host, of all its ranks at once and by sockets (PACELINE_ALGORITHM=sockets), in
turns. Where the machine has one socket only, its cores are divided into two that stand for sockets:
that shows what the further pass costs, and nothing of what it saves. Claim, on several sockets: an
all-reduce of 16 MiB takes no longer by sockets.

    python benchmarks/exchange/sockets.py [--ranks 4 8]
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    OUT,
    console,
    finish,
    new_table,
    on_ranks,
    options,
    ratio,
    result_of,
    run,
    spread,
    target,
)

from paceline.cluster.topology.topology import topology
from paceline.comm.shared.open_group import SOCKET_VARIABLE
from paceline.plurals import format_ranges

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
JUDGED = 16 << 20


def main() -> None:
    parser = options("sockets", __doc__ or "", repeats=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    args = parser.parse_args()
    lists, real = sockets()
    args.sockets = lists
    found = {}
    for ranks in args.ranks:
        for name, each in measure(ranks, lists, args.repeats, args.sizes).items():
            found[f"{ranks} ranks, {name}"] = each
    report(args, found, real)


def sockets() -> tuple[list[str], bool]:
    """Hardware threads of each, one a core; and whether they are sockets."""
    host, mine = topology(), os.sched_getaffinity(0)
    cores = sorted({cpu.core for cpu in host.at(mine)} & mine)
    packages = host.packages(cores)
    if len(packages) > 1:
        return [
            format_ranges([c.number for c in host.at(cores) if c.package == p]) for p in packages
        ], True
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    half = len(cores) // 2
    return [format_ranges(cores[:half]), format_ranges(cores[half : 2 * half])], False


def measure(ranks: int, lists: list[str], repeats: int, sizes: list[int]) -> Any:
    words = [OUT, "--rounds", repeats, "--sizes", *sizes]
    command = on_ranks(ranks, "exchange/sockets.py", *words, options=["--bind", "none"])
    return result_of(command, **{SOCKET_VARIABLE: " ".join(lists)})


def report(args: Any, found: dict[str, list[float]], real: bool) -> None:
    medians = {name: spread(each) for name, each in found.items()}
    what = "sockets" if real else "cores of one socket that stand for two"
    headings = ("", "ms at once", "ms by sockets", "times as long")
    table = new_table(*headings, title=f"All-reduce by sockets ({what}: {', '.join(args.sockets)})")
    ratios, claims = {}, []
    for ranks in args.ranks:
        for size in args.sizes:
            flat, by = (f"{ranks} ranks, {how} {size}" for how in ("at once", "by sockets"))
            name = f"{ranks} ranks, {size:,} bytes"
            ratios[name] = ratio(found[by], found[flat])
            cells = [f"{1e3 * medians[one]['median']:.3f}" for one in (flat, by)]
            low, high = (ratios[name][key] for key in ("q1", "q3"))
            table.add_row(name, *cells, f"{ratios[name]['median']:.2f} ({low:.2f} to {high:.2f})")
            if real and size == JUDGED:
                claims.append(target(f"{name}: by sockets, of at once", 1.0, ratios[name]))
    console.print(table)
    finish(args, found, medians, ratios, claims)


if __name__ == "__main__":
    run(main)
