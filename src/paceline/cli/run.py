"""The command ``paceline run``."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..launch.job import Job
from .common.base import app, exit_on_mistake, in_words
from .common.options import (
    Args,
    Bind,
    CpusPerRank,
    Env,
    Exchange,
    Fresh,
    HangTimeout,
    Hostfile,
    Hosts,
    Launcher,
    Module,
    Ranks,
    Script,
    Settings,
    Smt,
    Threads,
    TuneCompression,
    TuneExchange,
    knobs_of,
    tuning_of,
)
from .common.script_options import ScriptCommand
from .common.stage_before_run import PackHosts, sets_of


@app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  paceline run -n 4 train.py --epochs 10   ·   "
    "paceline run -n 2 -m package.train   ·   "
    "paceline run -n 4 --max-restarts 3 train.py   ·   "
    "paceline run -H host1:4,host2:4 train.py   ·   "
    "salloc -N 2 paceline run train.py",
)
def run(
    script: Script,
    args: Args = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    env: Env = None,
    launcher: Launcher = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what would start where, and start nothing.")
    ] = False,
    module: Module = False,
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
    fresh: Fresh = False,
    threads: Threads = None,
    bind: Bind = "auto",
    cpus_per_rank: CpusPerRank = None,
    smt: Smt = None,
    report_bindings: Annotated[
        bool,
        typer.Option(
            "--report-bindings",
            help="Once the ranks train, show where they, their threads and their loaders' "
            "workers really are, with a drawing of each host.",
        ),
    ] = False,
    hang_timeout: HangTimeout = None,
    settings: Settings = None,
    exchange: Exchange = None,
    tune_exchange: TuneExchange = None,
    tune_compression: TuneCompression = False,
    stage: Annotated[
        list[Path] | None,
        typer.Option(
            help="A packed set that the hosts bring to their own $PACELINE_STAGE while they "
            "train: see paceline stage. May be given again.",
            metavar="SET",
            show_default=False,
        ),
    ] = None,
    pack: Annotated[
        list[str] | None,
        typer.Option(
            help="If the set of --stage is not there yet: what it is packed from first, with the "
            "options of paceline pack, as --pack 'photos/ --resize 256'. On several hosts all of "
            "them pack. The second --pack is for the second --stage.",
            metavar="'SOURCE ...'",
            show_default=False,
        ),
    ] = None,
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

    with exit_on_mistake():
        knobs = knobs_of(settings, script, exchange)
        tuning = tuning_of(tune_exchange, tune_compression, script, knobs)
        sets = sets_of(
            stage or [], [] if show else pack or [], PackHosts(hosts, hostfile, launcher)
        )
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
        settings=knobs,
        tuning=tuning,
        stage=sets,
    )
    try:
        code = start(job, ranks, hosts, hostfile, launcher, env or [], show, explain_default=True)
    except ValueError as mistake:
        typer.echo(f"paceline: {in_words(mistake)}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing needs cleanup, and torch's takes half a second
