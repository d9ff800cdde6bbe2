"""``paceline run``."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..launch.job import Job
from .base import app


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  paceline run -n 4 train.py --epochs 10   ·   "
    "paceline run -n 2 -m package.train   ·   "
    "paceline run -n 4 --max-restarts 3 train.py   ·   "
    "paceline run -H host1:4,host2:4 train.py   ·   "
    "salloc -N 2 paceline run train.py",
)
def run(
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Ranks to start, in all. Default: on each host its GPUs; else the scheduler's "
            "tasks; else its NUMA domains.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H",
            "--hosts",
            help="Hosts and their slots, as host1:4,host2:4; reached over ssh.",
            show_default=False,
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="The hosts from a file: one a line, as host1, host1:4 or host1 slots=4.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="A variable that all ranks get, as NAME or NAME=VALUE. Repeatable. (Over ssh, "
            "PATH, VIRTUAL_ENV, OMP_*, NCCL_* and the like travel by themselves.)",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="What starts an agent on each host: ssh, srun, jsrun, blaunch, palsrun, flux, "
            "mpirun or mpiexec. Default: the allocation's own, or ssh.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what would start where, and start nothing.")
    ] = False,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often to start again after a failure; a script that uses world.epochs with "
            "a checkpoint goes on from the last one.",
            min=0,
        ),
    ] = 0,
    min_hosts: Annotated[
        int | None,
        typer.Option(
            help="With --max-restarts: when hosts are lost, go on with those that are left if "
            "there are at least so many. Default: all are needed.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="A new interpreter for every rank instead of a fork of one that has imported "
            "torch. Chosen by itself where OMP_PLACES, KMP_AFFINITY, GOMP_CPU_AFFINITY or "
            "LD_PRELOAD is set.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads a rank computes with. Default: OMP_NUM_THREADS, or one for each of its "
            "cores.",
            show_default=False,
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            help="core: each rank keeps to cores of its own, of one NUMA node where possible. "
            "device: to cores near its GPU. numa, socket: to a whole NUMA node or socket. none: "
            "not. auto: device or core where the cores are known to be this job's alone (granted "
            "by a scheduler, a container or taskset), else none."
        ),
    ] = "auto",
    cpus_per_rank: Annotated[
        int | None,
        typer.Option(
            help="Cores of each rank. Default: an equal part of those that are granted.",
            show_default=False,
        ),
    ] = None,
    smt: Annotated[
        bool | None,
        typer.Option(
            "--smt/--no-smt",
            help="A thread for each hardware thread of a rank's cores, or only one hardware "
            "thread of each. Default: all are its own, and it has a thread for each core.",
            show_default=False,
        ),
    ] = None,
    report_bindings: Annotated[
        bool,
        typer.Option(
            "--report-bindings",
            help="Once the ranks train, show where they, their threads and their loaders' "
            "workers really are, with a drawing of each host.",
        ),
    ] = False,
    hang_timeout: Annotated[
        float,
        typer.Option(
            help="After so many seconds in which no rank begins or ends anything (and three times "
            "as long as that ever took before) the job hangs: it is told who is missing where, "
            "with every rank's stack; then it is ended (exit code 124) or restarted. 0: never.",
        ),
    ] = 300.0,
    port: Annotated[
        int, typer.Option(help="Port of the ranks' store; 0 finds a free one.", min=0, max=65535)
    ] = 0,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record the script, whatever it is, and keep the record in this folder: see "
            "paceline report.",
            show_default=False,
        ),
    ] = None,
    count_flops: Annotated[
        bool,
        typer.Option(
            "--count-flops",
            help="With --record: count the FLOPs and the memory traffic of step 10, for the "
            "roofline of paceline report --machine. That step is slower for it.",
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the summary's figures to this file as JSON.", show_default=False),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks: of this machine, of named hosts, or of the whole allocation.

    Inside an allocation (Slurm, LSF, PBS, Flux, Cobalt) all of its hosts are used; -H and
    --hostfile name hosts by hand. Ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR ...), so a script written for torchrun runs unchanged. Lines that all ranks print
    are shown once, others carry their rank. If a rank fails, the others end within seconds, and
    the exit code is that rank's. On SIGUSR1 or SIGTERM, and before the job's time limit, a script
    with world.epochs(checkpoint=...) writes a checkpoint and leaves: exit code 75.
    """
    from ..launch.start import start

    job = Job(
        name=script,
        args=args or [],
        module=module,
        max_restarts=max_restarts,
        min_hosts=min_hosts,
        fresh=fresh,
        threads=threads,
        bind=bind,
        cpus_per_rank=cpus_per_rank,
        smt=smt,
        report_bindings=report_bindings,
        port=port,
        hang_timeout=hang_timeout,
        summary=json,
        record=record,
        count_flops=count_flops,
    )
    try:
        code = start(job, ranks, hosts, hostfile, launcher, env or [], show)
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to tear down, and torch takes half a second for it
