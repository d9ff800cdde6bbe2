"""Claims: over two hosts of two ranks with a link of 200 Mbit/s an all-reduce is at least 1.4 times
as fast as flat gloo with ranks in blocks, 2.7 times with ranks round-robin, 3 times at 64 KiB, and
large ones use 90 % of the line; at 1 Gbit/s 70 % of an exchange as long as its backward is hidden.

The hosts are Linux namespaces of this machine (tests/bed), what each sends is narrowed with tc. In
one job, gloo and Paceline in turns; a figure is that of the slowest rank.

    python benchmarks/exchange/exchange_hosts.py      as root, after make test-packages
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, new_table, options, ratio, run, spread, target
from emulated_hosts import CONGESTION, limit_links, open_hosts, result_on_hosts
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
GLOO, OWN = "gloo", "paceline"
LAYOUTS = {  # hosts, options of the ranks' script
    "2 hosts x 2, blocks": (2, ()),
    "2 hosts x 2, round-robin": (2, ("--cyclic",)),
    "4 hosts x 2, blocks": (4, ()),
    "4 hosts x 2, round-robin": (4, ("--cyclic",)),
}
BLOCKS, CYCLIC = 1.4, 2.7
SMALL, LINE, HIDDEN = 3.0, 0.9, 0.7


def main() -> None:
    parser = options("exchange_hosts", __doc__ or "", repeats=7)
    parser.add_argument("--mbit", type=int, default=200, help="of each host's link")
    parser.add_argument("--overlap-mbit", type=int, default=1000)
    sizes = [KIB, 64 * KIB, MIB, 8 * MIB, 32 * MIB]
    parser.add_argument("--layers", type=int, default=48, help="of 1 MiB, of the overlap's model")
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with open_hosts(4) as hosts:

        def measure(where: str, mbit: int, *words: Any) -> dict[str, Any]:
            script = "exchange/exchange_hosts.py"
            return result_on_hosts(hosts, where, mbit, script, [], "--rounds", args.repeats, *words)

        limit_links(hosts, args.mbit)
        args.congestion = hosts.run("host1", "sysctl", "-n", CONGESTION).stdout.strip()
        for name, (count, words) in LAYOUTS.items():
            console.print(name, highlight=False)
            where = ",".join(f"host{at + 1}:2" for at in range(count))
            found[name] = measure(where, args.mbit, "--sizes", *args.sizes, *words)
        limit_links(hosts, args.overlap_mbit)
        console.print("overlap", highlight=False)
        more = ("--overlap", "--layers", args.layers)
        hidden = measure("host1:1,host2:1", args.overlap_mbit, *more)["overlap"]
    report(args, found, hidden)


def report(args: Any, found: dict[str, Any], hidden: dict[str, list[float]]) -> None:
    ratios = {
        name: {size: ratio(each[GLOO], each[OWN]) for size, each in sizes.items()}
        for name, sizes in found.items()
    }
    medians = {
        name: {
            size: {way: median(each[way]) for way in (GLOO, OWN)} for size, each in sizes.items()
        }
        for name, sizes in found.items()
    } | {"overlap": {way: median(each) for way, each in hidden.items()}}
    line = args.mbit * 1e6 / 8
    for name, sizes in found.items():
        headings = ("bytes", "gloo, ms", "paceline, ms", "times as fast", "low", "high")
        table = new_table(*headings, title=f"all-reduce, {name}, {args.mbit} Mbit/s")
        for size, each in sizes.items():
            ms = [f"{1e3 * spread(each[way])['median']:.2f}" for way in (GLOO, OWN)]
            said = ratios[name][size]
            cells = [f"{said[key]:.2f}" for key in ("median", "low", "high")]
            table.add_row(f"{int(size):,}", *ms, *cells)
        console.print(table)
    console.print(overlapped(args, hidden))
    two, other = list(LAYOUTS)[:2]
    large, small = str(max(args.sizes)), str(64 * KIB)
    took, best = (
        found[two][large][OWN],
        max((way for way in hidden if way.startswith(OWN)), key=lambda way: median(hidden[way])),
    )
    shown = [1 - one for one in hidden[best]]

    def of_gloo(name: str, size: str) -> dict[str, Any]:
        return ratio(found[name][size][OWN], found[name][size][GLOO])

    claims = [
        target("ranks in blocks, of gloo's time", 1 / BLOCKS, of_gloo(two, large)),
        target("ranks round-robin, of gloo's time", 1 / CYCLIC, of_gloo(other, large)),
        target("64 KiB, of gloo's time", 1 / SMALL, of_gloo(two, small)),
        target("of what the line takes", 1 / LINE, ratio(took, [int(large) / line] * len(took))),
        target(f"not hidden, {best} MiB", 1 - HIDDEN, ratio(shown, [1.0] * len(shown))),
    ]
    finish(args, {**found, "overlap": hidden}, medians, ratios, claims)


def overlapped(args: Any, hidden: dict[str, list[float]]) -> Table:
    back, out = (1e3 * median(hidden[key]) for key in ("backward_s", "exchange_s"))
    title = f"hidden of DDP's exchange, {args.overlap_mbit} Mbit/s: backward {back:.0f} ms"
    most = 100 * (1 - median(hidden["busy"]))  # a rank has a core, and it computes the backward
    headings = ("over, MiB of buckets", "%", "low", "high")
    table = new_table(*headings, title=f"{title}, exchange {out:.0f} ms; {most:.0f} % can be")
    for way, each in hidden.items():
        if way.partition(" ")[0] in (GLOO, OWN):
            told = spread(each)
            table.add_row(way, *(f"{100 * told[key]:.0f}" for key in ("median", "low", "high")))
    return table


def median(values: list[float]) -> float:
    return spread(values)["median"]


if __name__ == "__main__":
    run(main)
