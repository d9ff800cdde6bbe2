"""The options of the guard of the loss: --reference, --metric, --make-reference."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from ...analyze.reference.goal import parse_goal
from ...launch.guard.request import Action, GuardRequest, parse_metric
from .base import exit_on_mistake
from .options import can_be_written

DEFAULT_SEEDS = 3
SEEDS_WITHOUT_REFERENCE = "--seeds is for --make-reference. HINT: --make-reference FILE"


def guard_of(
    references: list[Path] | None,
    metric: str | None,
    action: Action,
    record: Path | None,
    until: str | None = None,
) -> GuardRequest | None:
    """Return what the guard is to do, or None.

    Raises:
        ValueError: The options do not fit together.
    """
    parse_metric(metric)
    if not references and action is not Action.TELL:
        raise ValueError(
            f"--on-divergence {action.value} needs a reference. HINT: add --reference FILE"
        )
    goal = None
    if until is not None:
        if references:
            raise ValueError(
                "--until and --reference can't be used together. HINT: leave out --reference"
            )
        goal = parse_goal(until, metric)
        metric = metric if metric is not None else goal.name
    elif not references and (metric is None or record is None):
        return None
    save = None
    if record is not None:
        from ...analyze.reference.reference_file import RECORD_FILE

        save = str((record / RECORD_FILE).absolute())
    names = [str(path) for path in references or []]
    return GuardRequest(names, metric, action, save, goal)


def check_reference_options(
    file: Path, references: list[Path] | None, ranks: int | None, record: Path | None
) -> Path:
    """Check the options of ``--make-reference``; return the file that is written.

    Args:
        file: The file, or a folder that gets it: --reference accepts both.

    Raises:
        ValueError: They do not fit together, or the file can't be written.
    """
    if references:
        raise ValueError(
            "--make-reference and --reference can't be used together. HINT: make the reference "
            "first, then run the job with --reference"
        )
    if ranks not in (None, 1):
        raise ValueError(
            f"-n {ranks}: a reference is trained on one rank. HINT: leave out -n, and give the "
            "script the global batch size"
        )
    if record is not None:
        raise ValueError(
            "--make-reference records nothing else. HINT: leave out --record, or use "
            "--record DIR --metric backward and --reference DIR"
        )
    if file.is_dir():
        from ...analyze.reference.reference_file import RECORD_FILE

        file /= RECORD_FILE
    can_be_written(file, "--make-reference")
    return file


def options_of(values: dict[str, Any]) -> list[str]:
    """Return the words of options: none for None and False, the name alone for True."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                words += [name, str(one)]
    return words


def run_reference(
    file: Path, words: list[str], metric: str | None, seeds: int | None, options: list[str]
) -> NoReturn:
    """Make a reference and end the process.

    Args:
        words: The script and its arguments.
        options: Other options of ``paceline run``.
    """
    from ...study.reference.make_reference import ReferenceRequest, make_reference

    with exit_on_mistake():
        request = ReferenceRequest(words, metric, seeds or DEFAULT_SEEDS, options)
        try:
            code = make_reference(request, file, lambda text: typer.echo(text, err=True))
        except KeyboardInterrupt:
            typer.echo("paceline: interrupted: no reference was written", err=True)
            code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
