"""The command ``paceline scale``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .common import critical_batch
from .common import study_jobs as jobs
from .common.base import UNDERSTAND, app, examples, exit_on_mistake, say
from .common.command import given_parameters, with_options
from .common.options import (
    Args,
    Horovod,
    HostAndEnvOptions,
    Module,
    RankOptions,
    Settings,
    flag,
    knobs_of,
    launch_words,
    value_option,
)
from .common.script_options import ScriptCommand
from .common.status_line import interruptible
from .common.study_outputs import OUTPUTS, StudyOutputs, print_comparison

if TYPE_CHECKING:
    from ..analyze.scaling.study_model import ScalingStudy

MEASUREMENT = "Measurement"
TARGET = "Time to a target"


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """The options of ``paceline scale``, as typed."""

    script: Annotated[
        str | None,
        typer.Argument(
            help="Training script, or module with -m.", metavar="SCRIPT", show_default=False
        ),
    ] = None
    args: Args = None
    sizes: Annotated[
        str | None,
        value_option(
            "Numbers of ranks to compare: 1,2,4,8. The smallest one is the reference.",
            "N,N,...",
            "-n",
            "--ranks",
        ),
    ] = None
    strong: Annotated[
        bool, flag("--strong", "Strong scaling: the same global batch at every size.")
    ] = False
    weak: Annotated[
        bool,
        flag(
            "--weak",
            "Weak scaling: the same batch per rank at every size. Default: both kinds, and "
            "strong scaling alone if --minutes is too short for both.",
        ),
    ] = False
    minutes: Annotated[
        float | None,
        value_option(
            "Maximum duration of all runs, or with --submit of each job. Default: 10.",
            "MINUTES",
            min=0.2,
        ),
    ] = None
    output: Annotated[
        Path | None,
        value_option(
            "New folder of the study: records, figures, request. Default: scaling-SCRIPT, "
            "with a number if it exists.",
            "DIR",
            "-o",
            "--output",
        ),
    ] = None
    continued: Annotated[
        Path | None,
        value_option(
            "Continue the study in this folder: run what is missing. Without a script.",
            "DIR",
            "--continue",
        ),
    ] = None
    show: Annotated[
        Path | None,
        value_option("Print the study in this folder, and write its files. Nothing is run.", "DIR"),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        value_option(
            "Compare the studies in two folders, as before and after a remedy, and print the "
            "differences larger than the noise; with --html as a page. Nothing is run.",
            "DIR DIR",
        ),
    ] = None
    module: Module = False
    settings: Settings = None
    global_batch: Annotated[
        int | None,
        value_option(
            "Batch of all ranks at the smallest size. Default: that of the script. Needed if "
            "ARGS contain {per_rank} or {global}, which become the batch of each size; {ranks} and "
            "{seed} become the number of ranks and of the repeat.",
            "N",
            panel=MEASUREMENT,
            min=1,
        ),
    ] = None
    layout: Annotated[
        str | None,
        value_option(
            "Layout of the models of world.distribute at every size, such as 'zero3' or "
            "'dp x tp2': the data ranks grow. Default: that of the script.",
            "LAYOUT",
            panel=MEASUREMENT,
        ),
    ] = None
    steps: Annotated[
        int | None,
        value_option(
            "Optimizer steps measured in each run; further ones are run as a warm-up. "
            "Default: 20 to 400, depending on --minutes.",
            "N",
            panel=MEASUREMENT,
            min=6,
        ),
    ] = None
    precision: Annotated[
        str,
        value_option(
            "Repeat the runs of a size until its throughput is known this precisely (half of "
            "the 90 % interval), 3 to 12 times.",
            "PERCENT",
            panel=MEASUREMENT,
            show_default=True,
        ),
    ] = "3%"
    efficiency: Annotated[
        float,
        value_option(
            "Lowest efficiency of a size that is worthwhile.",
            "SHARE",
            panel=MEASUREMENT,
            min=0.01,
            max=1.0,
            show_default=True,
        ),
    ] = 0.8
    oversubscribe: Annotated[
        bool, flag("--oversubscribe", "Allow more ranks than cores or GPUs.", panel=MEASUREMENT)
    ] = False
    beside: Annotated[
        bool,
        flag(
            "--side-by-side",
            "On several hosts: run sizes at the same time that fit on different hosts. They "
            "share the network, and may disturb each other.",
            panel=MEASUREMENT,
        ),
    ] = False
    until: Annotated[
        str | None,
        value_option(
            "Train every size until a value of world.log meets this comparison, and report "
            "the time and the node-hours until then: 'accuracy>=0.97'.",
            "'NAME>=VALUE'",
            panel=TARGET,
        ),
    ] = None
    metric: Annotated[
        str | None,
        value_option(
            "With --until and --critical-batch: regular expression for lines of the output, "
            "with a group for the value, or the name of a value of world.log.",
            "REGEX|NAME",
            panel=TARGET,
        ),
    ] = None
    seeds: Annotated[
        int | None,
        value_option(
            "With --until and --critical-batch: number of runs of each size, each with "
            "another seed. Default: 3.",
            "N",
            panel=TARGET,
            min=1,
            max=100,
        ),
    ] = None
    critical: critical_batch.CriticalOptions
    outputs: StudyOutputs
    jobs: jobs.JobsOptions
    nodes: HostAndEnvOptions
    how: RankOptions
    horovod: Horovod = None

    def words(self) -> list[str]:
        """Return the options of ``paceline run`` that do not select the hosts."""
        return launch_words(self.module, self.how, self.nodes, {"--horovod": self.horovod})

    def checked_script(self, example: str) -> tuple[str, list[str]]:
        """Return the script and its arguments. Raises ValueError if it is missing or can't run.

        example: Options for the message.
        """
        from ..launch.job import Job, check

        if self.script is None:
            raise ValueError(f"there is no script. HINT: paceline scale {example} SCRIPT")
        args = self.args or []
        check(Job(name=self.script, args=args, module=self.module))
        return self.script, args


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
        ("paceline scale -n 2 --critical-batch train.py", "critical batch"),
        (
            "paceline scale -n 4,8 --submit --gpus-per-node 4 --global-batch 512 train.py",
            "a job for each size",
        ),
        ("paceline scale --continue scaling-train", "continue a study, or gather its jobs"),
        ("paceline scale --show scaling-train --html study.html", "a page of a study"),
        ("paceline scale --compare before after --html page.html", "two studies"),
    ),
)
@with_options
def scale(context: typer.Context, options: ScaleOptions) -> None:
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
    from ..report.terminal.live_studies import StudyDisplay
    from ..study.scale.jobs import has_jobs
    from ..study.scale.run_study import run_study

    given = given_parameters(context)
    minutes, outputs, continued = options.minutes, options.outputs, options.continued
    with exit_on_mistake():
        outputs.check()
        shows = options.show is not None or options.compare is not None
        if (options.critical.critical and not shows) or (
            continued is not None and _is_critical(continued)
        ):
            _measure_critical(options, given)
            return
        options.critical.check_unused()
        if _shows_only(options, given):
            return
        if continued is not None:
            _check_continued(given, has_jobs(continued))
            folder = continued
        else:
            jobs.check_given(given)
            begun = _new_study(options)
            if begun is None:
                return
            folder = begun
        only = options.jobs.only
        if only is None and has_jobs(folder):
            jobs.gather_jobs(folder, minutes, options.jobs.node_hours)
            _finish(outputs, read_study(folder))
            return
        with interruptible() as interruption, StudyDisplay() as display:
            ended = run_study(folder, display, minutes, None if only is None else {only})
        _finish(outputs, ended.study)
    if ended.interrupted:
        _exit_interrupted(folder, interruption.signal_number)


def _exit_interrupted(folder: Path, signal_number: int | None) -> NoReturn:
    say(f"interrupted. HINT: paceline scale --continue {folder}", lines=False)
    raise typer.Exit(128 + (signal_number or 2))


def _new_study(options: ScaleOptions) -> Path | None:
    """Create the folder of a study, and return it; None if its jobs run the study, or are shown.

    Raises:
        ValueError: The options are invalid or contradict each other.
    """
    from ..analyze.scaling.study_model import STRONG, WEAK, StudyRequest
    from ..study.scale import request as parse
    from ..study.scale.run_study import new_study

    goal_options = parse.parse_target(options.until, options.metric, options.seeds)
    script, args = options.checked_script("-n 1,2,4")
    asked = ((STRONG, options.strong), (WEAK, options.weak))
    request = StudyRequest(
        script,
        args,
        os.getcwd(),
        [kind for kind, on in asked if on] or [STRONG, WEAK],
        parse.parse_sizes(options.sizes),
        options.nodes.words(),
        options.words(),
        knobs_of(options.settings, script),
        options.global_batch,
        options.steps,
        parse.parse_precision(options.precision),
        options.minutes,
        options.oversubscribe,
        side_by_side=options.beside,
        weak_if_time=not options.weak and not options.strong,
        efficiency=options.efficiency,
        layout=parse.parse_layout(options.layout),
        **goal_options,
    )
    folder = options.output or parse.new_folder(script)
    if options.jobs.submit:
        of_jobs = options.jobs.checked(options.how.cpus_per_rank)
        jobs.submit_study(request, folder, of_jobs, options.jobs.dry_run)
        return None
    new_study(folder, request)
    say(f"the study is in {folder}", lines=False)
    return folder


def _finish(outputs: StudyOutputs, study: "ScalingStudy") -> None:
    """Analyse a study, print it, and write its files."""
    from ..predict.remedies import study_proposals
    from ..report.scaling.findings import findings_of

    proposals = {kind: study_proposals(study, kind) for kind in study.request.kinds}
    outputs.finish(study, findings_of(study, proposals))


def _is_critical(folder: Path) -> bool:
    from ..analyze.scaling.critical.critical_model import is_critical

    return is_critical(folder)


def _measure_critical(options: ScaleOptions, given: dict[str, str]) -> None:
    """Begin or continue a measurement of the critical batch."""
    if options.continued is not None:
        _check_continued(given, is_in_jobs=False)
    critical_batch.check_given(given)
    folder = options.continued or _new_critical(options)
    with interruptible() as interruption:
        whole = critical_batch.measure(folder, options.minutes, options.outputs)
    if not whole:
        _exit_interrupted(folder, interruption.signal_number)


def _new_critical(options: ScaleOptions) -> Path:
    """Create the folder of a measurement of the critical batch, and return it."""
    from ..analyze.scaling.critical.critical_model import CriticalRequest
    from ..launch.guard.request import parse_metric
    from ..study.scale.critical_study import new_critical
    from ..study.scale.request import new_folder

    fields = options.critical.fields(options.sizes, options.seeds)
    script, args = options.checked_script("--critical-batch -n 2")
    parse_metric(options.metric or None)
    request = CriticalRequest(
        script,
        args,
        os.getcwd(),
        settings=knobs_of(options.settings, script),
        where=options.nodes.words(),
        options=options.words(),
        global_batch=options.global_batch,
        steps=options.steps,
        minutes=options.minutes,
        metric=options.metric or "",
        **fields,
    )
    folder = options.output or new_folder(script)
    new_critical(folder, request)
    say(f"the measurement is in {folder}", lines=False)
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


def _shows_only(options: ScaleOptions, given: dict[str, str]) -> bool:
    """Show one study or compare two, and return True; return False if runs are wanted."""
    show, compare, outputs = options.show, options.compare, options.outputs
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
