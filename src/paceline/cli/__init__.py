"""The command line: one file a command; parse, call, print."""

from ..launch.ranks.local_host import InServer
from ..launch.single_node import serve
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
    except InServer as forked:
        job = forked
    serve(job)  # not in the handler: a rank's exceptions have no context of ours
