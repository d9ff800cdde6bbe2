"""The command ``paceline diagnose``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..security.text import printable
from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, print_json, with_options
from .common.options import (
    Horovod,
    HostAndEnvOptions,
    Json,
    RankOptions,
    ScriptOptions,
    Settings,
    knobs_of,
    launch_words,
    output_option,
    value_option,
)
from .common.script_options import ScriptCommand
from .common.status_line import StatusLine, interruptible

if TYPE_CHECKING:
    from ..analyze.diagnosis.diagnosis import Diagnosis

MEASUREMENT = "Measurement"  # heading of options in --help


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """The options of ``paceline diagnose``, as typed."""

    script: ScriptOptions
    minutes: Annotated[
        float,
        value_option(
            "Maximum duration. A longer measurement gives narrower intervals.",
            "MINUTES",
            min=0.2,
            show_default=True,
        ),
    ] = 5.0
    try_: Annotated[
        list[str] | None,
        value_option(
            "Set this remedy (all: every remedy, best prediction first), measure it in "
            "alternation with the unchanged training, and keep it if it helps. May be repeated. "
            "Everything together takes at most 1.5 times --minutes.",
            "NAME[=VALUE]",
            "--try",
        ),
    ] = None
    save_settings: Annotated[
        Path | None,
        output_option(
            "With --try: write the remedies that helped to this file, for paceline run --settings."
        ),
    ] = None
    settings: Settings = None
    html: Annotated[
        Path | None,
        output_option(
            "Write a page with causes, evidence and charts to this file, for any browser."
        ),
    ] = None
    json: Json = None
    machine: Annotated[
        Path | None,
        value_option(
            "Machine file (paceline check): also compare the computation with the limits "
            "measured there.",
            "FILE",
            panel=MEASUREMENT,
        ),
    ] = None
    steps: Annotated[
        int | None,
        value_option(
            "Optimizer steps measured in each experiment. Default: 10 to 400, depending on "
            "--minutes.",
            "N",
            panel=MEASUREMENT,
            min=3,
        ),
    ] = None
    warm_up: Annotated[
        int,
        value_option(
            "Optimizer steps before the measured ones.",
            "N",
            "--warm-up",
            panel=MEASUREMENT,
            min=1,
            show_default=True,
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
        if options.save_settings is not None and not wanted:
            raise ValueError("--save-settings needs --try. HINT: add --try all")
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


class DiagnosisOutputs:
    """What the user asked for: text or JSON, a page, a settings file.

    Args:
        json: File of ``--json``, ``STDOUT``, or None.
        html: File of ``--html``, or None.
        settings: File of ``--save-settings``, or None.
    """

    def __init__(self, json: Path | None, html: Path | None, settings: Path | None) -> None:
        self._json, self._html, self._settings = json, html, settings
        self._trials = 0  # printed so far
        self._has_printed = False

    def update(self, found: "Diagnosis") -> None:
        """Write all files, and print what is new in a diagnosis that goes on."""
        from ..report.diagnosis.remedies import describe_trial

        self._write_files(found)
        if self._json is None:
            if not self._has_printed:
                self._print(found)
                self._has_printed = True
            trials = found.tried.trials if found.tried is not None else []
            for trial in trials[self._trials :]:
                typer.echo(printable(describe_trial(trial)))
            self._trials = len(trials)

    def finish(self, found: "Diagnosis") -> None:
        """Write all files, print what was not printed yet, and say where the files are."""
        # first: the process that reads the output may have ended (| head)
        written = self._write_files(found)
        if self._json == STDOUT:
            from ..report.diagnosis.diagnosis_document import as_json

            print_json(as_json(found), STDOUT, indent=1)
        if self._json is None:
            self._print(found)
        for message in written:
            typer.echo(message, err=self._json == STDOUT)

    def _print(self, found: "Diagnosis") -> None:
        from ..report.diagnosis import diagnosis_document as shown
        from ..report.terminal.draw import print_document

        if self._has_printed:
            print_document(lambda _: shown.trials_document(found))
        else:
            print_document(lambda width: shown.diagnosis_document(found, width))

    def _write_files(self, found: "Diagnosis") -> list[str]:
        """Write the files that were asked for. Return a message for each."""
        from ..report.diagnosis import diagnosis_document as shown

        written = []
        if self._json is not None and self._json != STDOUT:
            print_json(shown.as_json(found), self._json, indent=1)
        if self._settings is not None and found.tried is not None:
            from ..study.diagnose.diagnose import save_kept_settings

            written.append(save_kept_settings(found, self._settings))
        if self._html is not None:
            from ..report.page.write_page import document_page, save

            document = shown.diagnosis_document(found)
            written.append(save(document_page(document, shown.diagnosis_charts(found)), self._html))
        return written
