"""The command ``paceline run``."""

import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..cluster.horovod_import import check_choice
from ..launch.guard.request import Action
from ..launch.job import Job
from .common.base import RUN, app, examples, exit_on_mistake, in_words
from .common.guard_options import (
    SEEDS_WITHOUT_REFERENCE,
    check_reference_options,
    guard_of,
    options_of,
    run_reference,
)
from .common.options import (
    BINDING,
    FAULTS,
    LAYOUTS,
    NODES,
    RECORDING,
    Args,
    Bind,
    CpusPerRank,
    Env,
    Exchange,
    Fresh,
    HangTimeout,
    Horovod,
    Hostfile,
    Hosts,
    Launcher,
    MakeReference,
    MetricOption,
    Module,
    OnDivergence,
    Pack,
    Ranks,
    References,
    Script,
    Seeds,
    Settings,
    Smt,
    Stage,
    Threads,
    TuneCompression,
    TuneExchange,
    Until,
    knobs_of,
    layout_knob,
    tuning_of,
)
from .common.script_options import ScriptCommand
from .common.stage_before_run import PackHosts, sets_of


class RunCommand(ScriptCommand):
    """``paceline run``, with options of torchrun."""

    renamed: ClassVar[dict[str, str]] = {"--show": "--dry-run"}
    translated: ClassVar[dict[str, tuple[str, str]]] = {
        "--nproc-per-node": ("--ranks", "the number of ranks on all nodes"),
        "--nproc_per_node": ("--ranks", "the number of ranks on all nodes"),
        "--master-port": ("--port", "the port of the ranks' store"),
        "--master_port": ("--port", "the port of the ranks' store"),
        "--max_restarts": ("--max-restarts", "the number of restarts of the job"),
    }
    answered: ClassVar[dict[str, str]] = {
        option: hint
        for options, hint in (
            (("--standalone",), "leave it out; paceline run starts the ranks of this machine"),
            (
                ("--nnodes", "--node-rank", "--node_rank"),
                "start paceline run once, in the allocation of a scheduler or with "
                "-H host1:4,host2:4; it starts the ranks of all nodes",
            ),
            (
                (
                    *("--master-addr", "--master_addr", "--rdzv-backend", "--rdzv_backend"),
                    *("--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-id", "--rdzv_id"),
                ),
                "leave it out; paceline run finds the address by which the nodes reach each other",
            ),
        )
        for option in options
    }


@app.command(
    cls=RunCommand,
    rich_help_panel=RUN,
    short_help="Start a script on the ranks of this machine, hosts or an allocation",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline run -n 4 train.py --epochs 10", "4 ranks on this machine"),
        ("paceline run -n 2 -m package.train", "a module"),
        ("paceline run -n 4 --record run/record train.py", "then: paceline report run/record"),
        ("paceline run -n 4 --max-restarts 3 train.py", "restart after failures"),
        ("paceline run -n 4 --show-memory train.py", "memory of each layout, before training"),
        ("paceline run --rehearse 512 train.py", "errors of 512 ranks, on one machine"),
        ("paceline run -n 8 --show-layout --layout 'dp2 x tp4' train.py", "what axes send"),
        ("paceline run --make-reference ref.json train.py", "losses of one rank, 3 seeds"),
        ("paceline run -n 4 --reference ref.json train.py", "report a loss that leaves them"),
        ("paceline run -n 4 --until 'accuracy>=0.97' train.py", "end when it is reached"),
        ("paceline run -H host1:4,host2:4 train.py", "two hosts over ssh"),
        ("salloc -N 2 paceline run train.py", "all nodes of an allocation"),
    ),
)
def run(
    script: Script,
    args: Args = None,
    ranks: Ranks = None,
    module: Module = False,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record what every rank does, of any script, into this folder: see paceline "
            "report.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Number of restarts after failures. A script with world.epochs(checkpoint=...) "
            "resumes from its last checkpoint.",
            metavar="N",
            min=0,
        ),
    ] = 0,
    settings: Settings = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Print the figures of the summary as JSON after the output of the script; "
            "--json=FILE, or --json NAME.json, writes them to a file.",
            metavar="[=FILE]",
            show_default=False,
            readable=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print which ranks would start where, and start nothing."),
    ] = False,
    show_memory: Annotated[
        bool,
        typer.Option(
            "--show-memory",
            help="Print the predicted memory of a rank in each layout of world.distribute, and "
            "end. One process runs three steps of SCRIPT without computing its models. With "
            "--json, print it as JSON.",
            rich_help_panel=LAYOUTS,
        ),
    ] = False,
    rehearse: Annotated[
        int | None,
        typer.Option(
            "--rehearse",
            help="Run SCRIPT as single ranks of a job of N ranks, one after the other, in one "
            "process on this machine without network, for two steps. Print what each axis "
            "exchanges, the memory of the ranks, and the first error that they would meet (exit "
            "code 1). Computes on the CPU; values are not those of a training.",
            metavar="N",
            min=1,
            show_default=False,
            rich_help_panel=LAYOUTS,
        ),
    ] = None,
    show_layout: Annotated[
        bool,
        typer.Option(
            "--show-layout",
            help="Print on which host each rank would run, and what each axis of the layout sends "
            "in a step over which links, and end. Rehearses the script (see --rehearse).",
            rich_help_panel=LAYOUTS,
        ),
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Layout of the models of world.distribute, in place of that of the script: "
            "'dp2 x tp4', 'zero3'.",
            metavar="LAYOUT",
            show_default=False,
            rich_help_panel=LAYOUTS,
        ),
    ] = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    launcher: Launcher = None,
    env: Env = None,
    port: Annotated[
        int,
        typer.Option(
            help="Port of the ranks' store. 0 selects a free port.",
            metavar="PORT",
            min=0,
            max=65535,
            rich_help_panel=NODES,
        ),
    ] = 0,
    bind: Bind = "auto",
    threads: Threads = None,
    cpus_per_rank: CpusPerRank = None,
    smt: Smt = None,
    fresh: Fresh = False,
    report_bindings: Annotated[
        bool,
        typer.Option(
            "--report-bindings",
            help="After the first step, show the cores on which ranks, their threads and loader "
            "workers run, with a drawing of each node.",
            rich_help_panel=BINDING,
        ),
    ] = False,
    hang_timeout: HangTimeout = None,
    min_hosts: Annotated[
        int | None,
        typer.Option(
            help="With --max-restarts: continue without lost nodes, if at least this many remain. "
            "Default: as many nodes as at the start.",
            metavar="N",
            show_default=False,
            rich_help_panel=FAULTS,
        ),
    ] = None,
    host_discovery_script: Annotated[
        str | None,
        typer.Option(
            help="With --max-restarts: program that prints the hosts, one HOST[:N] a line. "
            "Paceline runs it every 5 s. When it names a new host, the ranks write a checkpoint "
            "and continue with more ranks, at most -n. Without -H it names the hosts of the "
            "start, too.",
            metavar="PROGRAM",
            show_default=False,
            rich_help_panel=FAULTS,
        ),
    ] = None,
    stage: Stage = None,
    pack: Pack = None,
    reference: References = None,
    metric: MetricOption = None,
    on_divergence: OnDivergence = Action.TELL,
    until: Until = None,
    make_reference: MakeReference = None,
    seeds: Seeds = None,
    horovod: Horovod = None,
    exchange: Exchange = None,
    tune_exchange: TuneExchange = None,
    tune_compression: TuneCompression = False,
    count_flops: Annotated[
        bool,
        typer.Option(
            "--count-flops",
            help="With --record: count FLOPs and memory traffic of step 10, for the roofline of "
            "paceline report --machine. That step is slower.",
            rich_help_panel=RECORDING,
        ),
    ] = False,
) -> None:
    """Start SCRIPT on the ranks of this machine, of named hosts, or of an allocation.

    In an allocation (Slurm, LSF, PBS, Flux, Cobalt) all of its nodes are used. Ranks get the
    environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so scripts
    written for torchrun run unchanged. Lines that all ranks print are shown once; other lines
    begin with their rank. If a rank fails, Paceline ends the others within seconds and returns
    the exit code of that rank. On SIGUSR1, SIGTERM and before the time limit, a script with
    world.epochs(checkpoint=...) writes a checkpoint and ends with exit code 75.
    """
    from ..launch.start import start

    with exit_on_mistake():
        ranks = _check_shown(
            dry_run, show_memory, rehearse, show_layout, ranks, record, make_reference
        )
        guard = guard_of(reference, metric, on_divergence, record, until)
        if make_reference is not None:
            if until is not None:
                raise ValueError(
                    "--until and --make-reference can't be used together: a reference is trained "
                    "to its end. HINT: leave out --until"
                )
            make_reference = check_reference_options(make_reference, reference, ranks, record)
        elif seeds is not None:
            raise ValueError(SEEDS_WITHOUT_REFERENCE)
        found_horovod = check_choice(horovod)
        knobs = knobs_of(settings, script, exchange) | layout_knob(layout)
        tuning = tuning_of(tune_exchange, tune_compression, script, knobs)
        sets = sets_of(
            stage or [], [] if dry_run else pack or [], PackHosts(hosts, hostfile, launcher)
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
        guard=guard,
        horovod=found_horovod,
    )
    if make_reference is not None:
        words = options_of(
            {
                "--threads": threads,
                "--bind": bind,
                "--cpus-per-rank": cpus_per_rank,
                "--hang-timeout": hang_timeout,
                "--settings": settings,
                "--exchange": exchange,
                "--horovod": horovod,
                "--env": env,
                "--fresh": fresh,
            }
        )
        run_reference(make_reference, job.words, metric, seeds, words)
    try:
        code = start(
            job,
            ranks,
            hosts,
            hostfile,
            launcher,
            env or [],
            dry_run,
            explain_default=True,
            show_memory=show_memory,
            rehearse=rehearse is not None,
            show_layout=show_layout,
            discovery=host_discovery_script,
        )
    except ValueError as mistake:
        typer.echo(f"paceline: {in_words(mistake)}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing needs cleanup, and torch's takes half a second


def _check_shown(
    dry_run: bool,
    show_memory: bool,
    rehearse: int | None,
    show_layout: bool,
    ranks: int | None,
    record: Path | None,
    make_reference: Path | None,
) -> int | None:
    """Return the number of ranks, after checking the options that train nothing.

    Raises:
        ValueError: Options contradict each other.
    """
    given = {
        "--show-memory": show_memory,
        "--rehearse": rehearse is not None,
        "--show-layout": show_layout,
    }
    named = [name for name, is_given in given.items() if is_given]
    if named and (dry_run or (len(named) > 1 and show_memory)):
        both = " and ".join(["--dry-run", *named] if dry_run else named)
        raise ValueError(f"{both} can't be used together. HINT: one of them")
    if named and record is not None:
        raise ValueError(f"{named[0]} records nothing. HINT: leave out --record")
    if named and make_reference is not None:
        raise ValueError(f"{named[0]} trains nothing. HINT: leave out --make-reference")
    if rehearse is None:
        return ranks
    if ranks not in (None, rehearse):
        raise ValueError(
            f"-n {ranks} and --rehearse {rehearse} name two numbers of ranks. HINT: leave out -n"
        )
    return rehearse
