"""The command line: one file a command; parse, call, print."""

from ..launch.ranks.local_host import ForkedRankServer
from ..launch.single_node import run_rank_server
from .common.base import app

# In the order in which --help lists them.
# isort: off
from . import run, check, diagnose, record, report, top, submit, pack, stage, bench

# isort: on
__all__ = [
    "app",
    "bench",
    "check",
    "diagnose",
    "main",
    "pack",
    "record",
    "report",
    "run",
    "stage",
    "submit",
    "top",
]


def main() -> None:
    """The ``paceline`` command."""
    try:
        app()
    except ForkedRankServer as forked:
        job = forked
    run_rank_server(job)  # not in the handler: a rank's exceptions have no context of ours
