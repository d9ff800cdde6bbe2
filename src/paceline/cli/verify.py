"""The command ``paceline verify``."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, print_json, with_options
from .common.guard_options import check_reference_options, run_reference
from .common.options import (
    Horovod,
    HostAndEnvOptions,
    Json,
    MakeReference,
    MetricOption,
    RankOptions,
    ScriptOptions,
    Seeds,
    Settings,
    launch_words,
    output_option,
    value_option,
)
from .common.script_options import ScriptCommand
from .common.status_line import StatusLine, interruptible

if TYPE_CHECKING:
    from ..study.trials import ScriptRequest

MINUTE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of ``paceline verify``, as typed."""

    script: ScriptOptions
    minutes: Annotated[
        float,
        value_option(
            "Maximum duration of all runs together.", "MINUTES", min=0.2, show_default=True
        ),
    ] = 5.0
    html: Annotated[
        Path | None,
        output_option("Write a page with the findings and charts to this file, for any browser."),
    ] = None
    json: Json = None
    accept: Annotated[
        list[str] | None,
        value_option(
            "Accept a difference from one process that is meant, and that an experiment "
            "confirms: batch-norm, random-numbers, padding, part-loss or own-loss. May be "
            "repeated.",
            "NAME",
        ),
    ] = None
    settings: Settings = None
    nodes: HostAndEnvOptions
    how: RankOptions
    horovod: Horovod = None
    make_reference: MakeReference = None
    seeds: Seeds = None
    metric: MetricOption = None


@app.command(
    cls=ScriptCommand,
    rich_help_panel=UNDERSTAND,
    short_help="Find out whether N ranks train what one process would",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline verify -n 4 train.py --epochs 10", "mistakes, each with its line"),
        ("paceline verify -n 2 --html answer.html train.py", "a page for any browser"),
        ("paceline verify -n 4 --json train.py > answer.json", "for other programs"),
        ("paceline verify --accept part-loss train.py", "a loss over each rank's own samples"),
        ("paceline verify -H host1:4,host2:4 train.py", "two hosts over ssh"),
        ("paceline verify --make-reference ref.json train.py", "losses of one rank, 3 seeds"),
    ),
)
@with_options
def verify(options: VerifyOptions) -> None:
    """Find out whether N ranks train what one process would with the same samples.

    SCRIPT runs a few steps of a few epochs on N ranks, and again on one rank with the same
    samples. Paceline compares samples, random numbers, gradients before and after the exchange,
    updates, buffers and states, layer by layer, and shows what differs first, with its line.

    The exit code is 1 if something differs by more than measured rounding, 2 if nothing could be
    compared, and 0 otherwise. What depends on your intention is a question, and does not change it.

    A difference that may be meant is tested: one process trains the batches of the ranks one after
    the other. --accept NAME accepts one that this confirms; so does accept = ["NAME"] in the table
    [verify] of a settings file.

    On several hosts, TMPDIR has to name a folder that all of them share. --make-reference compares
    nothing: it makes the reference that paceline run --reference holds a longer training against.

    The script and its files are not changed: what the script writes goes to a scratch folder. A
    run that would change a file that no overlay can cover is stopped with a message.
    """
    from ..study.trials import ScriptRequest

    script, html, json = options.script, options.html, options.json
    settings = options.settings.absolute() if options.settings is not None else None
    words = launch_words(
        script.module,
        options.how,
        options.nodes,
        {"--horovod": options.horovod, "--settings": settings},
    )
    with exit_on_mistake():
        if options.make_reference is not None:
            if html is not None or json is not None or options.accept:
                raise ValueError(
                    "--make-reference compares nothing. HINT: leave out --html, --json and --accept"
                )
            file = check_reference_options(options.make_reference, None, script.ranks, None)
            others = [word for word in words if word != "-m"]
            run_reference(file, script.words, options.metric, options.seeds, others)
        for name, value in (("--seeds", options.seeds), ("--metric", options.metric)):
            if value is not None:
                raise ValueError(f"{name} is for --make-reference. HINT: --make-reference FILE")
        accepted = _accepted(options.accept, options.settings)
    asked = ScriptRequest(
        *(script.script, script.args or [], options.nodes.words(), words),
        script.ranks,
        options.minutes,
    )
    _answer(asked, accepted, html, json)


def _accepted(names: list[str] | None, settings: Path | None) -> list[str]:
    """Return the differences that the options and the settings file accept.

    Raises:
        ValueError: There is no difference of such a name.
    """
    from ..analyze.verification.mistakes import MEANT
    from ..cost.machine.dataclass_tree import shorten
    from ..knobs.settings import accepted_differences

    found = list(names or [])
    found += accepted_differences(settings) if settings is not None else []
    for name in found:
        if name not in MEANT:
            raise ValueError(
                f"--accept {shorten(name)}: there is no difference of this name. HINT: use one of "
                f"{', '.join(MEANT)}"
            )
    return found


def _answer(
    asked: "ScriptRequest", accepted: list[str], html: Path | None, json: Path | None
) -> NoReturn:
    """Run the script, print what was found, and end with the exit code."""
    from ..analyze.verification.find import judge
    from ..report import verification_document as report
    from ..report.verification_document import exit_code
    from ..study.verify import run_verification

    with exit_on_mistake():
        end_s = time.monotonic() + MINUTE_S * asked.minutes
        with interruptible() as interruption, StatusLine(end_s) as status:
            runs = run_verification(asked, status.say)
            status.clear()
            found = (runs, *judge(runs, accepted))
            written = None
            if html is not None:  # first: the process that reads the output may have ended
                from ..report.page.write_page import document_page, save

                charts = report.verification_charts(found)
                document = report.verification_document(found, charts)
                written = save(document_page(document, charts), html)
            if json is not None:
                print_json(report.as_json(found), json, indent=1)
            else:
                from ..report.terminal.draw import print_document

                print_document(lambda _: report.verification_document(found))
            if written is not None:
                typer.echo(written, err=json == STDOUT)
    if interruption.signal_number is not None:
        raise typer.Exit(128 + interruption.signal_number)
    raise typer.Exit(exit_code(found))
