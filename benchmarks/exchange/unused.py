"""What it costs that ranks agree on which parameters they used: steps of DDP with and without the
search for unused parameters, and all-reduces of DDP's map (an int32 a parameter) and of as many
bits. Claim: the map takes at most a hundredth of a step, so that bits in its place would save less.

Two hosts of two ranks, Linux namespaces of this machine (tests/bed), their links narrowed with tc.

    python benchmarks/exchange/unused.py      as root, after make test-packages
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import console, finish, new_table, options, ratio, run, spread, target
from emulated_hosts import limit_links, open_hosts, result_on_hosts

HOSTS = "host1:2,host2:2"
SHARE = 0.01
PARAMETERS = (120, 1200, 12_000)
WAYS = {"plain": "DDP", "search": "find_unused_parameters", "static": "static_graph"}


def main() -> None:
    parser = options("unused", __doc__ or "", repeats=15)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10, help="of one measurement")
    args = parser.parse_args()
    with open_hosts(2) as hosts:
        limit_links(hosts, args.mbit)
        words = ["--rounds", args.repeats, "--steps", args.steps, "--parameters", *PARAMETERS]
        found = result_on_hosts(
            hosts, HOSTS, args.mbit, "exchange/unused.py", ["--exchange", "paceline"], *words
        )
    report(args, found)


def report(args: Any, found: dict[str, list[float]]) -> None:
    medians = {name: spread(each) for name, each in found.items()}
    headings = ("", "ms", "low", "high")
    title = f"DDP of 120 parameters on two hosts of two ranks, {args.mbit} Mbit/s"
    table = new_table(*headings, title=title)
    named = {f"map {n}": f"its map of {n:,} parameters" for n in PARAMETERS}
    named |= {f"bits {n}": f"as many bits, {n:,}" for n in PARAMETERS}
    for name, words in {**WAYS, **named}.items():
        cells = (f"{1e3 * medians[name][key]:.2f}" for key in ("median", "low", "high"))
        table.add_row(words, *cells)
    console.print(table)
    ratios = {name: ratio(found[name], found["plain"]) for name in ("search", "static")}
    ratios |= {f"map {n}": ratio(found[f"map {n}"], found[f"bits {n}"]) for n in PARAMETERS}
    share = ratio(found[f"map {PARAMETERS[0]}"], found["search"])
    claims = [target("DDP's map of 120 parameters, of a step", SHARE, share)]
    finish(args, found, medians, ratios, claims)


if __name__ == "__main__":
    run(main)
