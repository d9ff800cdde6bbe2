"""The command ``paceline record``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .common.base import app, exit_on_mistake
from .common.options import Args, Script
from .common.script_options import ScriptCommand


@app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="Example:  torchrun --nproc-per-node 4 --no-python paceline record run/record train.py",
)
def record(
    folder: Annotated[Path, typer.Argument(help="Where the records go, the same for all ranks.")],
    script: Script,
    args: Args = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    count_flops: Annotated[
        bool,
        typer.Option("--count-flops", help="Count the FLOPs of step 10: see paceline run."),
    ] = False,
) -> None:
    """Run SCRIPT as one recorded rank of any launcher: torchrun, srun, mpirun.

    Ranks may be on several hosts, if FOLDER is on a file system that they share.
    """
    from ..launch.ranks.rank_process import record_here

    with exit_on_mistake():
        if count_flops:
            os.environ["PACELINE_COUNT_FLOPS"] = "1"
        record_here(folder, {"name": script, "args": args or [], "module": module})
