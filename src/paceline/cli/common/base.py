"""What every command shares: the application, and how a user's mistake is told."""

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
def mistakes_told() -> Iterator[None]:
    """Print the user's mistakes, and files that can't be used, in a line; exit code 2. A line for
    Ctrl-C, and 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever reads the output has gone
        raise
    except (ValueError, OSError) as mistake:
        typer.echo(f"paceline: {in_words(mistake)}", err=True)
        raise typer.Exit(2) from None


def in_words(mistake: ValueError | OSError) -> str:
    """Return what is wrong, as a terminal may show it: of a file in one line."""
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
