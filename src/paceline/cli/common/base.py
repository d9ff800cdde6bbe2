"""Code shared by all commands: the Typer application and the printing of user errors."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from ...security.files import InvalidFileError
from ...security.text import printable
from ...version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Scale a PyTorch training script, and see where every second of every rank goes.",
)


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Print errors of the user, and of files that cannot be used, without a traceback.

    The exit code is 2 for ValueError and OSError, and 130 for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the process that reads the output has ended
        raise
    except (ValueError, OSError) as mistake:
        typer.echo(f"paceline: {in_words(mistake)}", err=True)
        raise typer.Exit(2) from None


def in_words(mistake: ValueError | OSError) -> str:
    """Return the text of an error, safe for terminals; in one line if it concerns a file."""
    if isinstance(mistake, OSError):
        file = f"{mistake.filename}: " if mistake.filename else ""
        return printable(f"{file}{mistake.strerror or mistake}")
    return printable(str(mistake), lines=not isinstance(mistake, InvalidFileError))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass
