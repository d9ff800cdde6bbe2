"""The command ``paceline record``."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..cluster.horovod_import import VARIABLE, check_choice
from .common.base import RUN, app, examples, exit_on_mistake
from .common.options import Args, Horovod, Module, Script, flag
from .common.script_options import ScriptCommand


@app.command(
    cls=ScriptCommand,
    rich_help_panel=RUN,
    short_help="Record a rank that torchrun, srun or mpirun started",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("torchrun --nproc-per-node 4 --no-python paceline record DIR train.py", "torchrun"),
        ("srun -N 2 -n 8 paceline record DIR train.py", "srun"),
    ),
)
def record(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the records, the same for all ranks.", metavar="DIR")
    ],
    script: Script,
    args: Args = None,
    module: Module = False,
    count_flops: Annotated[
        bool, flag("--count-flops", "Count FLOPs and memory traffic of step 10: see paceline run.")
    ] = False,
    horovod: Horovod = None,
) -> None:
    """Run SCRIPT as one rank of another launcher, and record it.

    The launcher starts this command once for each rank. DIR must be on a file system that all
    nodes share. Then: paceline report DIR.
    """
    from ..launch.ranks.rank_process import record_here

    with exit_on_mistake():
        if count_flops:
            os.environ["PACELINE_COUNT_FLOPS"] = "1"
        os.environ[VARIABLE] = check_choice(horovod)
        record_here(folder, {"name": script, "args": args or [], "module": module})
