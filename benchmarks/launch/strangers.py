"""Claim: strangers who flood the launcher's port delay a job's start no more than by the cores they
use: at most 1.25 times the start while another port is flooded.

A job of 3 ranks starts on two hosts, which are Linux namespaces of this machine (tests/bed: root,
Slurm and Open MPI are needed), over srun and over mpirun, from a third host, in turns with and
without a flood. The flood (tests/support/flood.py) comes from the host of one of the agents: 1,000
idle connections, opened again as soon as they are dropped, and garbage, 10,000 connections before
the agents start and more for as long as the launcher listens. Measured from the start of srun or
mpirun until the last rank runs its script. The flood uses the same cores as the job. To tell that
apart from what it does to the launcher, the same flood also goes to another listener on the
launcher's host, which greets visitors with the same code in a process of its own ("elsewhere")."""

import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import (
    BIN,
    console,
    finish,
    new_table,
    options,
    ratio,
    rounds,
    run,
    shown,
    spread,
    target,
)
from emulated_hosts import bed, flood, open_hosts, require
from rich.progress import track

LIMIT = 1.25
WAYS = ("alone", "elsewhere", "flooded")
PROGRAMS = {"srun": "srun", "mpirun": bed.mpi.MPIRUN}
RANKS = 3
# Another listener, which greets visitors as the launcher does until it is ended.
SINK = """
import secrets, socket, sys
from paceline.launch.channel import host_handshake
from paceline.security.handshake import Acceptor
listening = socket.create_server((sys.argv[1], 0), backlog=1024)
secret = secrets.token_hex(32)
with Acceptor([listening], lambda address: host_handshake(secret)) as acceptor:
    print(listening.getsockname()[1], flush=True)
    while True:
        acceptor.wait(0.2)
"""
SCRIPT = """
import os, time
open("rank-" + os.environ["RANK"], "w").write(str(time.time()))
"""


def main() -> None:
    parser = options("strangers", __doc__ or "", repeats=9)
    parser.add_argument("--tools", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--idle", type=int, default=1000, help="idle connections")
    parser.add_argument("--garbage", type=int, default=10_000, help="before agents start")
    args = parser.parse_args()
    require([*bed.missing_slurm(), *bed.missing_mpi()])
    seconds: dict[str, list[float]] = {f"{t}, {way}": [] for t in args.tools for way in WAYS}
    strangers: dict[str, list[float]] = {tool: [] for tool in args.tools}
    cases = [(tool, way) for tool in args.tools for way in WAYS]
    with open_hosts(2) as hosts:
        slurm = bed.Slurm(hosts)
        for tool in args.tools:  # files are in memory from here on
            measure(slurm, tool, args, "alone")
        order = [case for each in rounds(cases, args.repeats) for case in each]
        for tool, way in track(order, "strangers", transient=True):
            took, made = measure(slurm, tool, args, way)
            seconds[f"{tool}, {way}"].append(took)
            if way == "flooded":
                strangers[tool].append(made)
    report(args, seconds, strangers)


def measure(slurm: bed.Slurm, tool: str, args: Any, way: str) -> tuple[float, int]:
    """Seconds until all ranks run; how many connections of garbage were made until then."""
    hosts, program = slurm.hosts, PROGRAMS[tool]
    folder = hosts.new_folder()
    (folder / "script.py").write_text(SCRIPT)
    environment = {**flood.announced(folder, program), **bed.MPI_VARIABLES, **slurm.variables}
    words = [BIN / "paceline", "run", "--fresh", "--launcher", program, "-H", "host1:2,host2:1"]
    if tool == "srun":
        words = ["salloc", "-N2", "-w", "host1,host2", *words]
    where, go, made, sink = folder / "where", folder / "go", "0", None
    if way == "elsewhere":
        address = hosts.address("host0")
        sink = hosts.start("host0", sys.executable, "-c", SINK, address)
        where = folder / "elsewhere"
        where.write_text(f"--connect {address},{sink.stdout.readline().strip()}")
    if way != "alone":
        size = ["--idle", args.idle, "--garbage", args.garbage]
        command = [sys.executable, flood.__file__, "--where", where, "--ready", go, *size]
        strangers = hosts.start("host2", *command)
    else:
        go.touch()
    try:
        hosts.run("host0", *words, "script.py", cwd=folder, env=environment)
        if sink is not None:
            sink.kill()
            sink.communicate()
        if way != "alone":
            made, _ = strangers.communicate(timeout=30)
        times = [float((folder / f"rank-{rank}").read_text()) for rank in range(RANKS)]
        return max(times) - float((folder / "released").read_text()), int(made)
    finally:
        hosts.restore()
        shutil.rmtree(folder, ignore_errors=True)


def report(args: Any, seconds: Any, strangers: Any) -> None:
    medians = {name: spread(each) for name, each in seconds.items()}
    medians |= {f"{tool}, garbage connections": spread(made) for tool, made in strangers.items()}
    headings = ("over", *(f"s {way}" for way in WAYS), "of elsewhere", "garbage connections")
    title = f"Start of a job on two hosts, {args.repeats} rounds: median (quartiles)"
    table = new_table(*headings, title=title)
    ratios, targets = {}, []
    for tool in args.tools:
        ratios[tool] = ratio(seconds[f"{tool}, flooded"], seconds[f"{tool}, elsewhere"])
        ratios[f"{tool}, of alone"] = ratio(seconds[f"{tool}, flooded"], seconds[f"{tool}, alone"])
        cells = [shown(medians[f"{tool}, {way}"]) for way in WAYS]
        made = f"{medians[f'{tool}, garbage connections']['median']:,.0f}"
        table.add_row(tool, *cells, shown(ratios[tool]), made)
        claim = f"{tool}: start while flooded, of the same flood elsewhere"
        targets.append(target(claim, LIMIT, ratios[tool]))
    console.print(table)
    finish(
        args, seconds | {f"{t}, garbage": n for t, n in strangers.items()}, medians, ratios, targets
    )


if __name__ == "__main__":
    run(main)
