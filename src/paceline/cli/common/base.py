"""Code shared by all commands: the Typer application and the printing of user errors."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from ...security.files import InvalidFileError
from ...security.text import printable
from ...version import __version__
from .command import Group

# Headings of the commands in --help.
RUN = "Run and submit"
UNDERSTAND = "Measure and understand"
DATASETS = "Data"
MACHINE = "Machine"

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Scale a PyTorch training script, and see where every second of every rank goes.",
    epilog="paceline COMMAND --help explains a command. Documentation: docs/, or make docs",
)


def examples(*lines: tuple[str, str]) -> str:
    """Return the epilog of a command's help: one example per line, with what it does."""
    width = max(len(command) for command, _ in lines)
    return "\n\n".join(["Examples:", *(f"{one:{width}}  {what}" for one, what in lines)])


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


def exit_on_address_space_limit(error: ImportError | MemoryError) -> None:
    """Exit with a message that names the limit of the address space, if it caused the error."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    reason = str(error).strip().rpartition("\n")[2] or "out of memory"
    # texts of the dynamic linker
    mapped = "failed to map segment" in reason or "annot allocate memory" in reason
    if limit != resource.RLIM_INFINITY and (mapped or isinstance(error, MemoryError)):
        sys.exit(
            f"paceline: {printable(reason)}: the address space of a process is limited to "
            f"{limit >> 10} KiB (ulimit -v). HINT: ulimit -v unlimited"
        )


def in_words(mistake: ValueError | OSError) -> str:
    """Return the text of an error, safe for terminals; in one line if it concerns a file."""
    if isinstance(mistake, OSError):
        file = f"{mistake.filename}: " if mistake.filename else ""
        return printable(f"{file}{mistake.strerror or mistake}")
    return printable(str(mistake), lines=not isinstance(mistake, InvalidFileError))


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", metavar=" ")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="With --version: also print the versions and the build of PyTorch and its "
            "libraries, backends, and the scheduler. Include this in bug reports.",
            metavar=" ",
        ),
    ] = False,
) -> None:
    if version:
        typer.echo(f"paceline {__version__}")
        if verbose:
            from .version import environment_lines

            typer.echo("\n".join(environment_lines()))
        raise typer.Exit
    if context.invoked_subcommand is None:  # --verbose alone
        typer.echo(context.get_help())
