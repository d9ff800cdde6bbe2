"""The command line interface. Each command has one module, which parses, calls and prints."""

from ..launch.ranks.local_host import ForkedRankServer
from ..launch.single_node import run_rank_server
from ..security.imports import warn_of_working_directory
from .common.base import app

# The order of imports is the order of the commands in --help.
# isort: off
from . import run, submit, convert, record, report, top, diagnose, verify, pack, stage, check, bench

# isort: on
__all__ = [
    "app",
    "bench",
    "check",
    "convert",
    "diagnose",
    "main",
    "pack",
    "record",
    "report",
    "run",
    "stage",
    "submit",
    "top",
    "verify",
]


def main() -> None:
    """Run the ``paceline`` command."""
    warn_of_working_directory()
    try:
        app()
    except ForkedRankServer as forked:
        job = forked
    run_rank_server(job)  # outside of ``except``: a rank's exceptions get no __context__
