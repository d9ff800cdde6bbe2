"""Code shared by all commands: the Typer application and the printing of user errors."""

import contextlib
import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from ...security.files import InvalidFileError
from ...security.processes import find_program
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
    return "\n\n".join(["Examples:", *(f"{command:{width}}  {what}" for command, what in lines)])


def say(text: str, lines: bool = True) -> None:
    """Print a message on standard error.

    lines: Whether its line breaks are printed. They are escaped in text of files and of paths.
    """
    typer.echo(printable(f"paceline: {text}", lines=lines), err=True)


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Print errors of the user, and of files that cannot be used, without a traceback.

    The exit code is 2 for ValueError and OSError, and 130 for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the process that reads the output has ended
        raise
    except (ValueError, OSError) as mistake:
        say(in_words(mistake))
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
            typer.echo("\n".join(environment_lines()))
        raise typer.Exit
    if context.invoked_subcommand is None:  # --verbose alone
        typer.echo(context.get_help())


PACKAGES = ("numpy", "lightning", "accelerate", "transformers", "nvidia-dali-cuda130", "h5py")
SCHEDULER_COMMANDS = ("sbatch", "bsub", "qsub", "flux", "mpirun", "mpiexec")


def environment_lines() -> list[str]:
    """Return lines of ``name: value``: versions, build of PyTorch, backends, scheduler."""
    facts = {
        "python": f"{platform.python_version()} ({platform.platform()})",
        **_torch(),
        **{name: version for name in PACKAGES if (version := _version(name))},
        "kernels of the exchange": _kernels(),
        "scheduler": _scheduler(),
        "commands": ", ".join(filter(find_program, SCHEDULER_COMMANDS)) or "no launcher in PATH",
    }
    return [f"{name}: {printable(value)}" for name, value in facts.items()]


def _torch() -> dict[str, str]:
    try:
        import torch
        import torch.distributed as dist

        from ...study.probe.measure.torch_build import library_versions, torch_build
    except Exception as error:  # a broken installation is what a bug report is about
        return {"torch": f"cannot be imported: {type(error).__name__}: {error}"}
    build = torch_build()
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "vector instructions": f"{build.get('capability', 'unknown')} in use, "
        f"{build.get('processor', 'unknown')} in the processor",
        "blas": build.get("blas", "unknown"),
        "libraries": ", ".join(f"{name} {found}" for name, found in library_versions().items()),
        "backends": ", ".join(name for name, there in backends.items() if there) or "none",
        "gpus": str(gpus),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _kernels() -> str:
    comm = Path(__file__).parents[2] / "comm"
    names = ("shared/kernel.so", "hosts/wire.so")
    missing = [name for name in names if not (comm / name).exists()]
    return f"{', '.join(missing)} not compiled" if missing else "compiled"


def _scheduler() -> str:
    from ...cluster.schedulers.detect import find_allocation

    try:
        found = find_allocation(dict(os.environ))
    except ValueError as error:
        return str(error)
    return "no allocation" if found is None else f"{found.scheduler} job {found.job}"
