"""The command ``paceline run``."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from ..cluster.horovod_import import check_choice
from ..launch.job import Job
from ..launch.options import LaunchOptions, Preview
from ..launch.remote.forwarded_env import shown_env_options
from .common.base import RUN, app, examples, exit_on_mistake, in_words, say
from .common.command import with_options
from .common.guard_options import GuardOptions, run_reference
from .common.options import (
    BINDING,
    FAULTS,
    LAYOUTS,
    NODES,
    RECORDING,
    Exchange,
    Horovod,
    HostAndEnvOptions,
    Pack,
    RankOptions,
    ScriptOptions,
    Settings,
    Stage,
    TuneCompression,
    TuneExchange,
    flag,
    knobs_of,
    layout_knob,
    option_words,
    output_option,
    tuning_of,
    value_option,
)
from .common.script_options import ScriptCommand
from .common.stage_before_run import sets_of


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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``paceline run``, as typed."""

    script: ScriptOptions
    record: Annotated[
        Path | None,
        value_option(
            "Record what every rank does, of any script, into this folder: see paceline report.",
            "DIR",
        ),
    ] = None
    max_restarts: Annotated[
        int,
        value_option(
            "Number of restarts after failures. A script with world.epochs(checkpoint=...) "
            "resumes from its last checkpoint.",
            "N",
            min=0,
            show_default=True,
        ),
    ] = 0
    settings: Settings = None
    json: Annotated[
        Path | None,
        output_option(
            "Print the figures of the summary as JSON after the output of the script; "
            "--json=FILE, or --json NAME.json, writes them to a file.",
            metavar="[=FILE]",
            readable=False,
        ),
    ] = None
    dry_run: Annotated[
        bool, flag("--dry-run", "Print which ranks would start where, and start nothing.")
    ] = False
    show_memory: Annotated[
        bool,
        flag(
            "--show-memory",
            "Print the predicted memory of a rank in each layout of world.distribute, and "
            "end. One process runs three steps of SCRIPT without computing its models. With "
            "--json, print it as JSON.",
            panel=LAYOUTS,
        ),
    ] = False
    rehearse: Annotated[
        int | None,
        value_option(
            "Run SCRIPT as single ranks of a job of N ranks, one after the other, in one "
            "process on this machine without network, for two steps. Print what each axis "
            "exchanges, the memory of the ranks, and the first error that they would meet (exit "
            "code 1). Computes on the CPU; values are not those of a training.",
            "N",
            panel=LAYOUTS,
            min=1,
        ),
    ] = None
    show_layout: Annotated[
        bool,
        flag(
            "--show-layout",
            "Print on which host each rank would run, and what each axis of the layout sends "
            "in a step over which links, and end. Rehearses the script (see --rehearse).",
            panel=LAYOUTS,
        ),
    ] = False
    layout: Annotated[
        str | None,
        value_option(
            "Layout of the models of world.distribute, in place of that of the script: "
            "'dp2 x tp4', 'zero3'.",
            "LAYOUT",
            panel=LAYOUTS,
        ),
    ] = None
    nodes: HostAndEnvOptions
    port: Annotated[
        int,
        value_option(
            "Port of the ranks' store. 0 selects a free port.",
            "PORT",
            panel=NODES,
            min=0,
            max=65535,
            show_default=True,
        ),
    ] = 0
    how: RankOptions
    report_bindings: Annotated[
        bool,
        flag(
            "--report-bindings",
            "After the first step, show the cores on which ranks, their threads and loader "
            "workers run, with a drawing of each node.",
            panel=BINDING,
        ),
    ] = False
    min_hosts: Annotated[
        int | None,
        value_option(
            "With --max-restarts: continue without lost nodes, if at least this many remain. "
            "Default: as many nodes as at the start.",
            "N",
            panel=FAULTS,
        ),
    ] = None
    host_discovery_script: Annotated[
        str | None,
        value_option(
            "With --max-restarts: program that prints the hosts, one HOST[:N] a line. "
            "Paceline runs it every 5 s. When it names a new host, the ranks write a checkpoint "
            "and continue with more ranks, at most -n. Without -H it names the hosts of the "
            "start, too.",
            "PROGRAM",
            panel=FAULTS,
        ),
    ] = None
    stage: Stage = None
    pack: Pack = None
    guard: GuardOptions
    horovod: Horovod = None
    exchange: Exchange = None
    tune_exchange: TuneExchange = None
    tune_compression: TuneCompression = False
    count_flops: Annotated[
        bool,
        flag(
            "--count-flops",
            "With --record: count FLOPs and memory traffic of step 10, for the roofline of "
            "paceline report --machine. That step is slower.",
            panel=RECORDING,
        ),
    ] = False

    @property
    def preview(self) -> Preview | None:
        """What is shown in place of a training.

        Raises:
            ValueError: Options contradict each other.
        """
        given = {
            Preview.PLAN: self.dry_run,
            Preview.MEMORY: self.show_memory,
            Preview.REHEARSAL: self.rehearse is not None,
            Preview.LAYOUT: self.show_layout,
        }
        asked = [preview for preview, is_given in given.items() if is_given]
        if not asked:
            return None
        if len(asked) > 1 and asked != [Preview.REHEARSAL, Preview.LAYOUT]:
            both = " and ".join(preview.value for preview in asked)
            raise ValueError(f"{both} can't be used together. HINT: one of them")
        name = asked[0].value
        if self.record is not None and asked[0] is not Preview.PLAN:
            raise ValueError(f"{name} records nothing. HINT: leave out --record")
        if self.guard.make_reference is not None:
            raise ValueError(f"{name} trains nothing. HINT: leave out --make-reference")
        return asked[-1]

    @property
    def ranks(self) -> int | None:
        """The number of ranks, of -n or --rehearse. Raises ValueError if they differ."""
        ranks = self.script.ranks
        if self.rehearse is None:
            return ranks
        if ranks not in (None, self.rehearse):
            raise ValueError(
                f"-n {ranks} and --rehearse {self.rehearse} name two numbers of ranks. HINT: leave "
                "out -n"
            )
        return self.rehearse

    def job(self) -> Job:
        """Return the job. Packs the datasets of --stage that are not packed yet.

        Raises:
            ValueError: Options are invalid or contradict each other.
        """
        script = self.script
        horovod = check_choice(self.horovod)
        knobs = knobs_of(self.settings, script.script, self.exchange) | layout_knob(self.layout)
        tuning = tuning_of(self.tune_exchange, self.tune_compression, script.script, knobs)
        pack = [] if self.dry_run else self.pack or []
        return Job(
            name=script.script,
            args=script.args or [],
            module=script.module,
            max_restarts=self.max_restarts,
            min_hosts=self.min_hosts,
            **vars(self.how),
            report_bindings=self.report_bindings,
            port=self.port,
            summary=self.json,
            record=self.record,
            count_flops=self.count_flops,
            settings=knobs,
            tuning=tuning,
            stage=sets_of(self.stage or [], pack, self.nodes),
            horovod=horovod,
            env=shown_env_options(self.nodes.env or []),
        )

    def words_of_reference(self) -> list[str]:
        """Return the options of the runs of --make-reference."""
        return self.how.words() + option_words(
            {
                "--settings": self.settings,
                "--exchange": self.exchange,
                "--horovod": self.horovod,
                "--env": self.nodes.env,
            }
        )


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
@with_options
def run(options: RunOptions) -> None:
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
        ranks, preview = options.ranks, options.preview
        reference = options.guard.reference_file(ranks, options.record)
        guard, job = options.guard.request(options.record), options.job()
    if reference is not None:
        asked, words = options.guard, options.words_of_reference()
        run_reference(reference, job.words, asked.metric, asked.seeds, words)
    nodes = replace(options.nodes, discovery=options.host_discovery_script)
    try:
        code = start(job, LaunchOptions(ranks, nodes, preview, guard=guard, explain_default=True))
    except ValueError as mistake:
        say(in_words(mistake))
        code = 2
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing needs cleanup, and torch's takes half a second
