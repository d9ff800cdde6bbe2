"""The command line interface. Each command has one module, which parses, calls and prints."""

import os
import sys
from pathlib import Path

from ..launch.ranks.local_host import ForkedRankServer
from ..launch.single_node import run_rank_server
from ..security.processes import warn_of_working_directory
from .common.base import app, exit_on_address_space_limit, in_words

# The order of imports is the order of the commands in --help.
# isort: off
from . import (
    run,
    horovodrun,
    submit,
)
from .models import convert, export
from . import (
    record,
    report,
    top,
    diagnose,
    scale,
    tune,
    verify,
    pack,
    stage,
    check,
    bench,
)

# isort: on
__all__ = [
    "app",
    "bench",
    "check",
    "convert",
    "diagnose",
    "export",
    "horovodrun",
    "main",
    "pack",
    "record",
    "report",
    "run",
    "scale",
    "stage",
    "submit",
    "top",
    "tune",
    "verify",
]


def main() -> None:
    """Run the ``paceline`` command."""
    _replace_closed_streams()
    warn_of_working_directory()
    if (name := Path(sys.argv[0]).name) in horovodrun.LINKED:
        sys.argv.insert(1, name)
    try:
        app()
    except OSError as error:  # standard output can't be written
        sys.exit(f"paceline: {in_words(error)}")
    except (ImportError, MemoryError) as error:
        exit_on_address_space_limit(error)
        raise
    except ForkedRankServer as forked:
        job = forked
    run_rank_server(job)  # outside of ``except``: a rank's exceptions get no __context__


def _replace_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed (``>&-``).

    Otherwise the next file or socket that is opened would get the number of the stream.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
