"""The command ``paceline verify``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, print_json
from .common.guard_options import check_reference_options, run_reference
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
    MakeReference,
    MetricOption,
    Module,
    Ranks,
    Script,
    Seeds,
    Smt,
    Threads,
    can_be_written,
    launch_options,
)
from .common.script_options import ScriptCommand
from .common.status_line import StatusLine, interruptible

if TYPE_CHECKING:
    from ..study.script_runs.script_runs import ScriptRequest

MINUTE_S = 60.0


@app.command(
    cls=ScriptCommand,
    rich_help_panel=UNDERSTAND,
    short_help="Find out whether N ranks train what one process would",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline verify -n 4 train.py --epochs 10", "mistakes, each with its line"),
        ("paceline verify -n 2 --html answer.html train.py", "a page for any browser"),
        ("paceline verify -n 4 --json train.py > answer.json", "for other programs"),
        ("paceline verify -H host1:4,host2:4 train.py", "two hosts over ssh"),
        ("paceline verify --make-reference ref.json train.py", "losses of one rank, 3 seeds"),
    ),
)
def verify(
    script: Script,
    args: Args = None,
    ranks: Ranks = None,
    module: Module = False,
    minutes: Annotated[
        float,
        typer.Option(
            help="Maximum duration of all runs together.",
            metavar="MINUTES",
            min=0.2,
        ),
    ] = 5.0,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with the findings and charts to this file, for any browser.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
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
    make_reference: MakeReference = None,
    seeds: Seeds = None,
    metric: MetricOption = None,
) -> None:
    """Find out whether N ranks train what one process would with the same samples.

    SCRIPT runs a few steps of a few epochs on N ranks, and again on one rank with the same
    samples. Paceline compares samples, random numbers, gradients before and after the exchange,
    parameters, learning rates and states, layer by layer, and names each mistake with its line.

    What depends on your intention is a question, and no mistake. The exit code is 1 if there is a
    mistake, and 0 otherwise.

    On several hosts, TMPDIR has to name a folder that all of them share. --make-reference compares
    nothing: it makes the reference that paceline run --reference holds a longer training against.

    The script and its files are not changed: what the script writes goes to a scratch folder.
    """
    from ..study.script_runs.script_runs import ScriptRequest

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
    with exit_on_mistake():
        if make_reference is not None:
            if html is not None or json is not None:
                raise ValueError(
                    "--make-reference compares nothing. HINT: leave out --html and --json"
                )
            file = check_reference_options(make_reference, None, ranks, None)
            words = ["-m"] * module + [script, *(args or [])]
            run_reference(file, words, metric, seeds, [one for one in options if one != "-m"])
        for name, value in (("--seeds", seeds), ("--metric", metric)):
            if value is not None:
                raise ValueError(f"{name} is for --make-reference. HINT: --make-reference FILE")
        if html is not None:
            can_be_written(html, "--html")
    _answer(ScriptRequest(script, args or [], where, options, ranks, minutes), html, json)


def _answer(asked: "ScriptRequest", html: Path | None, json: Path | None) -> NoReturn:
    """Run the script, print what was found, and end with the exit code."""
    from ..analyze.verification.find import judge
    from ..report.terminal.verification import findings as shown
    from ..study.verify.verify import run_verification

    with exit_on_mistake():
        end_s = time.monotonic() + MINUTE_S * asked.minutes
        with interruptible() as interruption, StatusLine(end_s) as status:
            runs = run_verification(asked, status.say)
            status.clear()
            found = (runs, *judge(runs))
            written = None
            if html is not None:  # first: the process that reads the output may have ended
                from ..report.page.verification_page import verification
                from ..report.page.write_page import save

                written = save(verification(found), html)
            if json is not None:
                print_json(shown.as_json(found), json, indent=1)
            else:
                from ..report.console import PlainConsole

                PlainConsole().print(shown.render(found))
            if written is not None:
                typer.echo(written, err=json == STDOUT)
    if interruption.signal_number is not None:
        raise typer.Exit(128 + interruption.signal_number)
    raise typer.Exit(int(any(not one.is_question for one in found[1])))
