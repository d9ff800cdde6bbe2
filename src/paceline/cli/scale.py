"""The command ``paceline scale``."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..security.text import printable
from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import print_json
from .common.options import (
    Args,
    Bind,
    CpusPerRank,
    Env,
    Fresh,
    HangTimeout,
    Hostfile,
    Hosts,
    Json,
    Launcher,
    Module,
    Settings,
    Smt,
    Threads,
    knobs_of,
    launch_options,
)
from .common.script_options import ScriptCommand
from .common.status_line import interruptible

MEASUREMENT = "Measurement"


@app.command(
    cls=ScriptCommand,
    rich_help_panel=UNDERSTAND,
    short_help="Measure how a script scales over numbers of ranks",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline scale -n 1,2,4,8 train.py --epochs 10", "strong and weak scaling"),
        ("paceline scale -n 1,2,4 --strong --minutes 5 train.py", "strong scaling alone"),
        (
            "paceline scale -n 1,2 --global-batch 64 train.py --batch-size {per_rank}",
            "batch in an argument",
        ),
        ("paceline scale --continue scaling-train", "continue an interrupted study"),
    ),
)
def scale(
    script: Annotated[
        str | None,
        typer.Argument(
            help="Training script, or module with -m.", metavar="SCRIPT", show_default=False
        ),
    ] = None,
    args: Args = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Numbers of ranks to compare: 1,2,4,8. The smallest one is the reference.",
            metavar="N,N,...",
            show_default=False,
        ),
    ] = None,
    strong: Annotated[
        bool,
        typer.Option("--strong", help="Strong scaling: the same global batch at every size."),
    ] = False,
    weak: Annotated[
        bool,
        typer.Option(
            "--weak",
            help="Weak scaling: the same batch per rank at every size. Default: both kinds, and "
            "strong scaling alone if --minutes is too short for both.",
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Maximum duration of all runs. Default: 10.",
            metavar="MINUTES",
            min=0.2,
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="New folder of the study: records, figures, request. Default: scaling-SCRIPT, "
            "with a number if it exists.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    continued: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            help="Continue the study in this folder: run what is missing. Without a script.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    module: Module = False,
    settings: Settings = None,
    json: Json = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Batch of all ranks at the smallest size. Default: that of the script. Needed if "
            "ARGS contain {per_rank} or {global}, which become the batch of each size; {ranks} and "
            "{seed} become the number of ranks and of the repeat.",
            metavar="N",
            min=1,
            show_default=False,
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps measured in each run; further ones are run as a warm-up. "
            "Default: 20 to 400, depending on --minutes.",
            metavar="N",
            min=6,
            show_default=False,
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="Repeat the runs of a size until its throughput is known this precisely (half of "
            "the 90 % interval), 3 to 12 times.",
            metavar="PERCENT",
            rich_help_panel=MEASUREMENT,
        ),
    ] = "3%",
    efficiency: Annotated[
        float,
        typer.Option(
            help="Lowest efficiency of a size that is worthwhile.",
            metavar="SHARE",
            min=0.01,
            max=1.0,
            rich_help_panel=MEASUREMENT,
        ),
    ] = 0.8,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Allow more ranks than cores or GPUs.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    launcher: Launcher = None,
    env: Env = None,
    bind: Bind = "auto",
    threads: Threads = None,
    cpus_per_rank: CpusPerRank = None,
    smt: Smt = None,
    fresh: Fresh = False,
    hang_timeout: HangTimeout = None,
) -> None:
    """Measure how SCRIPT scales: short runs on several numbers of ranks, interleaved and repeated.

    Strong scaling keeps the global batch, weak scaling the batch per rank. Paceline sets the batch
    in world.shard, in the DataLoader of the training, or by templates in ARGS, and checks in the
    record that the training used it. Every rank has the same number of cores at every size.

    A size is repeated until its throughput is known precisely enough, or the time is over. The
    warm-up steps of each run are found and left out. If the script fails at one size, the others
    are measured.

    The study's folder contains all that was measured. After Ctrl-C or a failure of the machine,
    --continue runs what is missing. The script and its files are not changed: what the script
    writes goes to a scratch folder.
    """
    from ..study.scale.progress_lines import ProgressLines
    from ..study.scale.request import new_folder, parse_precision, parse_sizes
    from ..study.scale.run_study import new_study, run_study
    from ..study.scale.study_text import study_text

    where, options = launch_options(
        *(hosts, hostfile, launcher, module, fresh, smt, env),
        {
            "--threads": threads,
            "--bind": bind,
            "--cpus-per-rank": cpus_per_rank,
            "--hang-timeout": hang_timeout,
        },
    )
    with exit_on_mistake():
        if continued is not None:
            _check_continued(script, sizes, output)
            folder = continued
        else:
            if script is None:
                raise ValueError("there is no script. HINT: paceline scale -n 1,2,4 SCRIPT")
            from ..analyze.scaling.study_model import STRONG, WEAK, StudyRequest

            request = StudyRequest(
                script,
                args or [],
                os.getcwd(),
                [kind for kind, on in ((STRONG, strong), (WEAK, weak)) if on] or [STRONG, WEAK],
                parse_sizes(sizes),
                where,
                options,
                knobs_of(settings, script),
                global_batch,
                steps,
                parse_precision(precision),
                minutes,
                oversubscribe,
                weak_if_time=not weak and not strong,
                efficiency=efficiency,
            )
            folder = output or new_folder(script)
            new_study(folder, request)
            typer.echo(printable(f"paceline: the study is in {folder}"), err=True)
        with interruptible() as interruption:
            ended = run_study(folder, ProgressLines(), minutes)
        if json is not None:
            print_json({"study": asdict(ended.study)}, json, 1, "paceline-scaling-study")
        else:
            typer.echo(study_text(ended.study))
    if ended.interrupted:
        typer.echo(
            printable(f"paceline: interrupted. HINT: paceline scale --continue {folder}"), err=True
        )
        raise typer.Exit(128 + (interruption.signal_number or 2))


def _check_continued(script: str | None, sizes: str | None, output: Path | None) -> None:
    given = {"a script": script, "-n": sizes, "--output": output}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ValueError(
            f"--continue takes the request from the study's folder, and {wrong[0]} is given too. "
            "HINT: leave it out, or start a new study with --output DIR"
        )
