"""The commands ``paceline horovodrun`` and ``paceline ddlrun``, and links with their names."""

import inspect
import os
import shlex
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from ..cluster.horovod_import import SHIM
from ..compat.horovod.launcher.option_table import DDLRUN, HOROVODRUN, LaunchOption, option_names
from ..security.processes import find_program
from ..version import __version__
from .common.base import RUN, app, examples, exit_on_mistake, say
from .common.command import Command
from .common.options import flag, value_option

LINKED = ("horovodrun", "ddlrun")  # names under which a link to paceline runs these commands
_BUILT = """Paceline {version}, with Horovod's interface:

Available Frameworks:
    [{tensorflow}] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers and Tensor Operations:
    [X] Paceline (shared memory within a node, one exchange per node between nodes)
    [X] Gloo
    [{nccl}] NCCL"""


class ForeignCommand(Command):
    """A command whose options are those of another tool, which are parsed elsewhere.

    Attributes:
        foreign: Names of the tool's options, by the command's name.
    """

    foreign: ClassVar[dict[str, set[str]]] = {
        tool: {name for option in table for name in option.names}
        for tool, table in (("horovodrun", HOROVODRUN), ("ddlrun", DDLRUN))
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for option in self.params for name in option.opts} | {"-h", "--help"}
        first = args[0].partition("=")[0] if args else "--help"
        rest: list[str] = super().parse_args(
            ctx, (args or [first]) if first in own else ["--", *args]
        )
        return rest


Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="Options of the tool, then the program: python train.py.", metavar="OPTIONS PROGRAM"
    ),
]


def _help(text: str, tool: str, table: tuple[LaunchOption, ...]) -> str:
    """Return the help of a command, with the names of the tool's options."""
    used, unused = option_names(table)
    return (
        f"{inspect.cleandoc(text)}\n\nOptions of {tool}: {used}.\n\n"
        f"Options without effect: {unused}."
    )


@app.command(
    cls=ForeignCommand,
    rich_help_panel=RUN,
    short_help="Start a Horovod script with the options of horovodrun",
    help=_help(
        """
        Start PROGRAM like horovodrun, on paceline run.

        All options of horovodrun 0.28 are accepted. Those without effect are named. The command
        prints the equivalent command of paceline run, and runs it. Elastic jobs (--min-np,
        --host-discovery-script) restart without lost hosts, and with new ones.
        """,
        *("horovodrun", HOROVODRUN),
    ),
    epilog=examples(
        ("paceline horovodrun -np 8 -H a:4,b:4 python train.py", "two hosts over ssh"),
        ("paceline horovodrun -np 4 --timeline-filename t.json python train.py", "a timeline"),
        ("paceline horovodrun --install-link ~/.local/bin", "then: horovodrun -np 4 ..."),
        ("paceline horovodrun --shim", "a folder for PYTHONPATH, for mpirun -n 4 python train.py"),
    ),
)
def horovodrun(
    words: Words = None,
    install_link: Annotated[
        Path | None,
        value_option(
            "Create a link named horovodrun in this folder, and end. A program of that name "
            "is not replaced.",
            "DIR",
        ),
    ] = None,
    shim: Annotated[
        bool,
        flag(
            "--shim",
            "Print a folder for PYTHONPATH with which import horovod finds Paceline's "
            "implementation in ranks that mpirun or srun start, and end. Horovod takes precedence "
            "where it is installed.",
        ),
    ] = False,
) -> None:
    with exit_on_mistake():
        if shim:
            typer.echo(SHIM)
            return
        if install_link is not None:
            typer.echo(_link("horovodrun", install_link))
            return
    _run("horovodrun", words or [])


@app.command(
    cls=ForeignCommand,
    rich_help_panel=RUN,
    short_help="Start a Horovod script with the options of ddlrun",
    help=_help(
        """
        Start PROGRAM like ddlrun of PowerAI DDL, on paceline run.

        Options without effect are named. The command prints the equivalent command of paceline run,
        and runs it. Without --accelerators, each host gets one rank for each of its GPUs.
        """,
        *("ddlrun", DDLRUN),
    ),
    epilog=examples(("paceline ddlrun -H host1,host2 python train.py", "a rank for each GPU")),
)
def ddlrun(
    words: Words = None,
    install_link: Annotated[
        Path | None,
        value_option(
            "Create a link named ddlrun in this folder, and end. A program of that name is "
            "not replaced.",
            "DIR",
        ),
    ] = None,
) -> None:
    with exit_on_mistake():
        if install_link is not None:
            typer.echo(_link("ddlrun", install_link))
            return
    _run("ddlrun", words or [])


def _run(tool: str, words: list[str]) -> None:
    from ..compat.horovod.launcher.translate import translate
    from ..launch.remote.start_commands import SSH_OPTIONS

    with exit_on_mistake():
        command = translate(tool, words)
    if command.role == "version":
        typer.echo(f"paceline {__version__}")
        return
    if command.role == "build":
        import torch

        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        parts = {"nccl": nccl, "tensorflow": find_spec("tensorflow") is not None}
        marks = {name: "X" if there else " " for name, there in parts.items()}
        typer.echo(_BUILT.format(version=__version__, **marks))
        return
    for line in command.lines(tool):
        say(line)
    if command.ssh:
        given = os.environ.get(SSH_OPTIONS, "")
        os.environ[SSH_OPTIONS] = f"{given} {shlex.join(command.ssh)}".strip()
    app(["run", *command.words], prog_name="paceline")


def _link(name: str, folder: Path) -> str:
    """Create a link to the command ``paceline``, and return its path.

    Raises:
        ValueError: The folder does not exist, or has a program of that name.
    """
    installed = Path(sysconfig.get_path("scripts"), "paceline")
    target = str(installed) if installed.exists() else find_program("paceline")
    link = folder / name
    if target is None:
        raise ValueError("the program paceline is not on PATH. HINT: activate its environment")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. HINT: mkdir -p {folder}")
    if os.path.lexists(link):
        if link.is_symlink() and os.path.realpath(link) == os.path.realpath(target):
            return str(link)
        raise ValueError(
            f"{link} exists, and is not a link of Paceline. HINT: choose another folder, or remove "
            "the file"
        )
    link.symlink_to(target)
    return str(link)
