"""The command ``paceline diagnose``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import with_options
from .common.diagnosis_outputs import DiagnosisOutputs
from .common.options import (
    Horovod,
    HostAndEnvOptions,
    Json,
    RankOptions,
    ScriptOptions,
    Settings,
    can_be_written,
    knobs_of,
    launch_words,
)
from .common.script_options import ScriptCommand
from .common.status_line import StatusLine, interruptible

if TYPE_CHECKING:
    from ..study.diagnose.diagnose import Diagnosis

MEASUREMENT = "Measurement"  # heading of options in --help


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The options of ``paceline diagnose``, as typed."""

    script: ScriptOptions
    minutes: Annotated[
        float,
        typer.Option(
            help="Maximum duration. A longer measurement gives narrower intervals.",
            metavar="MINUTES",
            min=0.2,
        ),
    ] = 5.0
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="NAME[=VALUE]",
            help="Set this remedy (all: every remedy, best prediction first), measure it in "
            "alternation with the unchanged training, and keep it if it helps. May be repeated. "
            "Everything together takes at most 1.5 times --minutes.",
            show_default=False,
        ),
    ] = None
    save_settings: Annotated[
        Path | None,
        typer.Option(
            help="With --try: write the remedies that helped to this file, for paceline run "
            "--settings.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    settings: Settings = None
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with causes, evidence and charts to this file, for any browser.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    json: Json = None
    machine: Annotated[
        Path | None,
        typer.Option(
            help="Machine file (paceline check): also compare the computation with the limits "
            "measured there.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=MEASUREMENT,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps measured in each experiment. Default: 10 to 400, depending on "
            "--minutes.",
            metavar="N",
            min=3,
            show_default=False,
            rich_help_panel=MEASUREMENT,
        ),
    ] = None
    warm_up: Annotated[
        int,
        typer.Option(
            "--warm-up",
            help="Optimizer steps before the measured ones.",
            metavar="N",
            min=1,
            rich_help_panel=MEASUREMENT,
        ),
    ] = 5
    nodes: HostAndEnvOptions
    how: RankOptions
    horovod: Horovod = None


@app.command(
    cls=ScriptCommand,
    rich_help_panel=UNDERSTAND,
    short_help="Find what slows a script down, and try remedies",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline diagnose -n 4 train.py --epochs 10", "causes, remedies, predicted gains"),
        ("paceline diagnose --try all --save-settings fast.toml train.py", "keep what helps"),
        ("paceline diagnose -n 4 --html found.html train.py", "a page for any browser"),
        ("paceline diagnose -H host1:4,host2:4 --minutes 10 train.py", "two hosts over ssh"),
        ("salloc -N 2 paceline diagnose --json train.py > found.json", "in an allocation"),
    ),
)
@with_options
def diagnose(options: DiagnoseOptions) -> None:
    """Find what slows SCRIPT down: run it a few steps at a time, with parts switched off.

    The loader, the gradient synchronization or the other ranks are switched off from outside.
    The differences show the share of each in a step. Causes are listed with their evidence, and
    with remedies and predicted gains. --try sets remedies, measures them, and keeps those that
    help.

    The results so far are printed and saved after each part, when the time is over, and after
    Ctrl-C or SIGTERM.

    The script and its files are not changed: what the script writes goes to a scratch folder. A
    run that would change a file that no overlay can cover is stopped with a message.
    """
    from ..cost.machine.machine_file import load
    from ..study.diagnose.diagnose import LADDER_SHARE, run_diagnosis, total_deadline, try_all
    from ..study.diagnose.run_script import RunRequest
    from ..study.diagnose.try_remedies import check_arguments

    script, wanted = options.script, options.try_ or []
    with exit_on_mistake():
        check_arguments(wanted)
        if options.save_settings is not None:
            if not wanted:
                raise ValueError("--save-settings needs --try. HINT: add --try all")
            can_be_written(options.save_settings, "--save-settings")
        if options.html is not None:
            can_be_written(options.html, "--html")
        known = load(options.machine) if options.machine is not None else None
        words = launch_words(
            script.module, options.how, options.nodes, {"--horovod": options.horovod}
        )
        asked = RunRequest(
            script.script,
            script.args or [],
            options.nodes.words(),
            words,
            script.ranks,
            options.minutes,
            options.steps,
            options.warm_up,
            settings=knobs_of(options.settings, script.script),
        )
        total = total_deadline(options.minutes, bool(wanted))
        outputs = DiagnosisOutputs(options.json, options.html, options.save_settings)
        with interruptible() as interruption, StatusLine(total.at_s) as status:
            first = total.part(LADDER_SHARE) if wanted else total
            found = run_diagnosis(replace(asked, deadline=first), status.say, known)
            if wanted and interruption.signal_number is None:

                def update(now: "Diagnosis") -> None:
                    status.clear()
                    outputs.update(now)

                update(found)
                found = try_all(replace(asked, deadline=total), found, wanted, status.say, update)
            status.clear()
            outputs.finish(found)
    if interruption.signal_number is not None:
        raise typer.Exit(128 + interruption.signal_number)
