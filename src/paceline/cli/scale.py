"""The command ``paceline scale``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..security.text import printable
from .common import critical_batch
from .common import study_jobs as jobs
from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import given_parameters
from .common.options import (
    Args,
    Bind,
    CpusPerRank,
    Env,
    Fresh,
    HangTimeout,
    Horovod,
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
from .common.study_outputs import (
    OUTPUTS,
    CsvFile,
    ExtrapFile,
    HtmlFile,
    LatexFile,
    StudyOutputs,
    SvgFile,
    TalpFolder,
    print_comparison,
)

if TYPE_CHECKING:
    from ..analyze.scaling.study_model import ScalingStudy

MEASUREMENT = "Measurement"
TARGET = "Time to a target"


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
        ("paceline scale -n 1,2,4 --until 'accuracy>=0.97' train.py", "time to accuracy"),
        (
            "paceline scale -n 2 --critical-batch train.py",
            "critical batch",
        ),
        (
            "paceline scale -n 4,8 --submit --gpus-per-node 4 --global-batch 512 train.py",
            "a job for each size",
        ),
        ("paceline scale --continue scaling-train", "continue a study, or gather its jobs"),
        ("paceline scale --show scaling-train --html study.html", "a page of a study"),
        ("paceline scale --compare before after --html page.html", "two studies"),
    ),
)
def scale(
    context: typer.Context,
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
            help="Maximum duration of all runs, or with --submit of each job. Default: 10.",
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
    show: Annotated[
        Path | None,
        typer.Option(
            help="Print the study in this folder, and write its files. Nothing is run.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            help="Compare the studies in two folders, as before and after a remedy, and print the "
            "differences larger than the noise; with --html as a page. Nothing is run.",
            metavar="DIR DIR",
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
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout of the models of world.distribute at every size, such as 'zero3' or "
            "'dp x tp2': the data ranks grow. Default: that of the script.",
            metavar="LAYOUT",
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
    beside: Annotated[
        bool,
        typer.Option(
            "--side-by-side",
            help="On several hosts: run sizes at the same time that fit on different hosts. They "
            "share the network, and may disturb each other.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            help="Train every size until a value of world.log meets this comparison, and report "
            "the time and the node-hours until then: 'accuracy>=0.97'.",
            metavar="'NAME>=VALUE'",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="With --until and --critical-batch: regular expression for lines of the output, "
            "with a group for the value, or the name of a value of world.log.",
            metavar="REGEX|NAME",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="With --until and --critical-batch: number of runs of each size, each with "
            "another seed. Default: 3.",
            metavar="N",
            min=1,
            max=100,
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    critical: critical_batch.Critical = False,
    multiples: critical_batch.Multiples = None,
    tolerance: critical_batch.Tolerance = None,
    rule: critical_batch.Rule = None,
    html: HtmlFile = None,
    csv: CsvFile = None,
    svg: SvgFile = None,
    latex: LatexFile = None,
    extrap: ExtrapFile = None,
    talp: TalpFolder = None,
    submit: jobs.Submit = False,
    dry_run: jobs.DryRun = False,
    node_hours: jobs.NodeHours = None,
    ranks_per_node: jobs.RanksPerNode = None,
    gpus_per_node: jobs.GpusPerNode = None,
    memory: jobs.Memory = None,
    queue: jobs.Queue = None,
    account: jobs.Account = None,
    scheduler: jobs.SchedulerName = None,
    setup: jobs.Setup = None,
    option: jobs.SchedulerOption = None,
    only: jobs.Only = None,
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
    horovod: Horovod = None,
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
    writes goes to a scratch folder. A run that would change a file that no overlay can cover is
    stopped with a message.
    """
    from ..analyze.scaling.study_folder import read_study
    from ..launch.job import Job
    from ..launch.job import check as check_job
    from ..report.terminal.scaling.live_study import StudyDisplay
    from ..study.scale.jobs import has_jobs
    from ..study.scale.request import (
        new_folder,
        parse_layout,
        parse_precision,
        parse_sizes,
        parse_target,
    )
    from ..study.scale.run_study import new_study, run_study

    where, options = launch_options(
        *(hosts, hostfile, launcher, module, fresh, smt, env),
        {
            "--threads": threads,
            "--bind": bind,
            "--cpus-per-rank": cpus_per_rank,
            "--hang-timeout": hang_timeout,
            "--horovod": horovod,
        },
    )
    outputs = StudyOutputs(json, html, csv, svg, latex, extrap, talp)
    given = given_parameters(context)
    asked = critical_batch.CriticalOptions(multiples, tolerance, rule, seeds)
    with exit_on_mistake():
        outputs.check()
        runs_critical = critical and show is None and compare is None
        if runs_critical or (continued is not None and _is_critical(continued)):
            if continued is not None:
                _check_continued(given, is_in_jobs=False)
            critical_batch.check_given(given)
            folder = continued or _new_critical(
                *(script, args, output, settings),
                {
                    **({} if continued is not None else asked.fields(sizes)),
                    "where": where,
                    "options": options,
                    "global_batch": global_batch,
                    "steps": steps,
                    "minutes": minutes,
                    "metric": metric or "",
                },
            )
            whole = False
            with interruptible() as interruption:
                whole = critical_batch.measure(folder, minutes, outputs)
            if whole:
                return
            typer.echo(
                printable(f"paceline: interrupted. HINT: paceline scale --continue {folder}"),
                err=True,
            )
            raise typer.Exit(128 + (interruption.signal_number or 2))
        asked.check_unused()
        if _shows_only(show, compare, outputs, given):
            return
        goal_options = parse_target(until, metric, seeds)
        if continued is not None:
            _check_continued(given, has_jobs(continued))
            folder = continued
        else:
            jobs.check_given(given)
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
                side_by_side=beside,
                weak_if_time=not weak and not strong,
                efficiency=efficiency,
                layout=parse_layout(layout),
                **goal_options,
            )
            check_job(Job(name=script, args=args or [], module=module))
            folder = output or new_folder(script)
            if submit:
                options_of_jobs = jobs.job_options(
                    *(scheduler, ranks_per_node, cpus_per_rank, gpus_per_node, memory),
                    *(queue, account, setup, option, node_hours),
                )
                jobs.submit_study(request, folder, options_of_jobs, dry_run)
                return
            new_study(folder, request)
            typer.echo(printable(f"paceline: the study is in {folder}"), err=True)
        if only is None and has_jobs(folder):
            jobs.gather_jobs(folder, minutes, node_hours)
            _finish(outputs, read_study(folder))
            return
        with interruptible() as interruption, StudyDisplay() as display:
            ended = run_study(folder, display, minutes, None if only is None else {only})
        _finish(outputs, ended.study)
    if ended.interrupted:
        typer.echo(
            printable(f"paceline: interrupted. HINT: paceline scale --continue {folder}"), err=True
        )
        raise typer.Exit(128 + (interruption.signal_number or 2))


def _finish(outputs: StudyOutputs, study: "ScalingStudy") -> None:
    """Analyse a study, print it, and write its files."""
    from ..predict.scaling import study_proposals
    from ..report.scaling.study_findings import findings_of

    proposals = {kind: study_proposals(study, kind) for kind in study.request.kinds}
    outputs.finish(study, findings_of(study, proposals))


def _is_critical(folder: Path) -> bool:
    from ..analyze.scaling.critical.critical_model import is_critical

    return is_critical(folder)


def _new_critical(
    script: str | None,
    args: list[str] | None,
    output: Path | None,
    settings: Path | None,
    fields: dict[str, Any],
) -> Path:
    """Create the folder of a measurement of the critical batch, and return it."""
    from ..analyze.scaling.critical.critical_model import CriticalRequest
    from ..launch.guard.request import parse_metric
    from ..launch.job import Job
    from ..launch.job import check as check_job
    from ..study.scale.critical.critical_study import new_critical
    from ..study.scale.request import new_folder

    if script is None:
        raise ValueError("there is no script. HINT: paceline scale --critical-batch -n 2 SCRIPT")
    check_job(Job(name=script, args=args or [], module="-m" in fields["options"]))
    parse_metric(fields["metric"] or None)
    request = CriticalRequest(
        script, args or [], os.getcwd(), settings=knobs_of(settings, script), **fields
    )
    folder = output or new_folder(script)
    new_critical(folder, request)
    typer.echo(printable(f"paceline: the measurement is in {folder}"), err=True)
    return folder


def _check_continued(given: dict[str, str], is_in_jobs: bool) -> None:
    """Raise ValueError for parameters that a study does not take when it is continued."""
    allowed = {"continued", "minutes", "only", *OUTPUTS, *(("node_hours",) if is_in_jobs else ())}
    wrong = [shown for name, shown in given.items() if name not in allowed]
    if wrong:
        raise ValueError(
            f"--continue takes the request from the study's folder, and {wrong[0]} is given too. "
            "HINT: leave it out, or start a new study with --output DIR"
        )
    if "only" in given and not is_in_jobs:
        raise ValueError("--only is for the jobs of --submit. HINT: leave it out")


def _shows_only(
    show: Path | None,
    compare: tuple[Path, Path] | None,
    outputs: StudyOutputs,
    given: dict[str, str],
) -> bool:
    """Show one study or compare two, and return True; return False if runs are wanted."""
    if show is None and compare is None:
        return False
    from ..analyze.scaling.study_folder import read_study

    option = "--show" if show is not None else "--compare"
    allowed = {"compare" if show is None else "show", *OUTPUTS}
    wrong = [shown for name, shown in given.items() if name not in allowed]
    if wrong:
        raise ValueError(
            f"{option} runs nothing, and {wrong[0]} is given too. HINT: leave one of them out"
        )
    if show is not None and _is_critical(show):
        from ..analyze.scaling.critical.critical_model import read_critical

        critical_batch.check_given(given)
        critical_batch.finish(read_critical(show), outputs)
        return True
    if show is not None:
        _finish(outputs, read_study(show))
        return True
    assert compare is not None
    from ..analyze.scaling.outcomes.compare_studies import compare_studies

    files = [
        name
        for name in ("csv", "svg", "latex", "extrap", "talp")
        if getattr(outputs, name) is not None
    ]
    if files:
        raise ValueError(
            f"--compare writes no --{files[0]}, only --html and --json. HINT: paceline scale "
            f"--show DIR --{files[0]} FILE for each study"
        )
    found = compare_studies(*(read_study(folder) for folder in compare))
    print_comparison(found, outputs.json, outputs.html)
    return True
