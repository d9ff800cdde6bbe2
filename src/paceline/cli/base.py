"""What every command shares: the application, and how a user's mistake is told."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from .. import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Scale a PyTorch training script, and see where every second of every rank goes.",
)


@contextlib.contextmanager
def mistakes_told() -> Iterator[None]:
    """The user's mistakes in a line, and exit code 2; a line for Ctrl-C, and 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
        raise typer.Exit(130) from None
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        raise typer.Exit(2) from None


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
