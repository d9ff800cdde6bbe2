"""Claim: over four hosts that stage from a shared server each byte crosses its link once, and the
time falls accordingly against every host reading all.

The hosts are Linux namespaces of this machine (tests/bed). host0 is the server: the others mount
its folder with sshfs, anew for each measurement, so that nothing of it is in their memory, and its
link is narrowed with tc. "paceline stage" is one command for all hosts, "each alone" one on every
host at the same time, as is "cp". Time is that of the slowest host's staging; the ranks' start is
beside it, under "command".

    python benchmarks/data/staging_hosts.py      as root, after make test-packages and with sshfs
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, console, finish, new_table, options, ratio, rounds, run, spread, target
from emulated_hosts import limit_link, open_hosts, require

TOGETHER, ALONE, CP = "paceline stage", "paceline stage, each alone", "cp, each alone"
WAYS = (TOGETHER, ALONE, CP)
SET, NEAR = "/tmp/server", "/tmp/near"
SFTP = "/usr/lib/openssh/sftp-server"
ONCE, FALLS = 1.1, 1.3  # of the set's bytes; of the number of hosts


def main() -> None:
    parser = options("staging_hosts", __doc__ or "", repeats=5)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--mbit", type=int, default=400, help="of the server's link")
    args = parser.parse_args()
    require([] if shutil.which("sshfs") else ["sshfs"])
    with open_hosts(args.hosts) as hosts:
        folder = hosts.new_folder() / "set"
        size = pack_dataset(folder, args.megabytes)
        limit_link(hosts, "host0", args.mbit, "100kb", "50ms")
        found: dict[str, Any] = {way: [] for way in WAYS}
        for turn, order in enumerate(rounds(list(WAYS), args.repeats)):
            for way in order:
                found[way].append(measure(hosts, folder, way, size))
            console.print(f"round {turn + 1} of {args.repeats}", highlight=False)
    report(args, found, size)


def pack_dataset(folder: Path, megabytes: int) -> int:
    from paceline.data import pack

    x = np.random.default_rng(0).integers(0, 256, (megabytes, 1_000_000), dtype=np.uint8)
    pack((x, np.arange(megabytes)), folder, shard_bytes=8_000_000)
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(hosts: Any, folder: Path, way: str, size: int) -> dict[str, float]:
    """Seconds; and bytes that left the server, by those of the set."""
    names = hosts.names[1:]
    for name in names:
        hosts.run(name, "mkdir", "-p", SET, NEAR)
        options = f"ro,max_conns=2,sftp_server={SFTP}"
        hosts.run(name, "sshfs", "-o", options, f"host0:{folder}", SET)
    try:
        before, start = sent_bytes(hosts), time.perf_counter()
        seconds = WHAT[way](hosts, names)
        command, after = time.perf_counter() - start, sent_bytes(hosts)
        whole = [
            hosts.run(name, "sh", "-c", f"ls {NEAR}/*/*/* {NEAR}/*/* | wc -l") for name in names
        ]
        assert all(int(one.stdout) > 2 for one in whole)
    finally:
        for name in names:
            hosts.run(name, "fusermount3", "-u", SET, check=False)
            hosts.run(name, "rm", "-rf", NEAR)
    return {"seconds": seconds, "command": command, "crossed": (after - before) / size}


def stage_together(hosts: Any, names: list[str]) -> float:
    words = [BIN / "paceline", "stage", SET, NEAR, "-H", ",".join(names), "--json"]
    answer = json.loads(hosts.run(names[0], *words, timeout=600).stdout)
    assert all(one["here"] == one["shards"] for one in answer["hosts"]), answer
    return max(one["seconds"] for one in answer["hosts"])


def stage_alone(hosts: Any, names: list[str]) -> float:
    words = [BIN / "paceline", "stage", SET, NEAR, "--json"]
    running = [hosts.start(name, *words) for name in names]
    return max(json.loads(one.communicate(timeout=600)[0])["seconds"] for one in running)


def copy_on_each(hosts: Any, names: list[str]) -> float:
    start = time.perf_counter()
    running = [hosts.start(name, "cp", "-r", SET, f"{NEAR}/a") for name in names]
    assert [one.wait(600) for one in running] == [0] * len(names)
    return time.perf_counter() - start


WHAT = {TOGETHER: stage_together, ALONE: stage_alone, CP: copy_on_each}


def sent_bytes(hosts: Any) -> int:
    answer = json.loads(hosts.run("host0", "ip", "-s", "-j", "link", "show", "eth0").stdout)
    return int(answer[0]["stats64"]["tx"]["bytes"])


def report(args: Any, found: dict[str, list[dict[str, float]]], size: int) -> None:
    medians = {
        way: {key: spread([one[key] for one in each]) for key in each[0]}
        for way, each in found.items()
    }
    least = size * 8 / (args.mbit * 1e6)
    headings = ("", "s", "low", "high", "command, s", "crossed, of the set")
    title = f"{size / 1e6:.0f} MB on {args.hosts} hosts, {args.mbit} Mbit/s: {least:.1f} s"
    table = new_table(*headings, title=title)
    for way, answer in medians.items():
        s = answer["seconds"]
        cells = [f"{s['median']:.1f}", f"{s['low']:.1f}", f"{s['high']:.1f}"]
        crossed, command = answer["crossed"]["median"], answer["command"]["median"]
        table.add_row(way, *cells, f"{command:.1f}", f"{crossed:.2f}")
    console.print(table)
    crossed = [one["crossed"] for one in found[TOGETHER]]
    took = {way: [one["seconds"] for one in each] for way, each in found.items()}
    ratios = {
        "crossed": ratio(crossed, [1.0] * len(crossed)),
        **{f"{TOGETHER} / {way}": ratio(took[TOGETHER], took[way]) for way in (ALONE, CP)},
        f"{TOGETHER} / the link": ratio(took[TOGETHER], [least] * len(crossed)),
    }
    claims = [
        target("each byte crosses the server's link once", ONCE, ratios["crossed"]),
        target(
            "the time falls as the number of hosts", FALLS / args.hosts,
            ratios[f"{TOGETHER} / {ALONE}"],
        ),
    ]  # fmt: skip
    finish(args, found, medians, ratios, claims)


if __name__ == "__main__":
    run(main)
