"""Checks that all ranks of one job run, one after the other.

A file of checks is a script: functions with the decorator ``check``, and ``main()`` at its end. A
test names one of them and reads how it ended on each rank, so that many tests share one job.
"""

import json
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
_process_sets: dict[tuple[int, ...], Any] = {}
_checks: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Have ``main`` run a function on every rank. It must call the same collectives on all."""
    _checks[function.__name__] = function
    return function


def process_set_of(members: list[int]) -> Any:
    """Return the process set of these ranks, which is created once."""
    import paceline.compat.horovod.torch as hvd

    if members == list(range(hvd.size())):
        return hvd.global_process_set
    if tuple(members) not in _process_sets:
        _process_sets[tuple(members)] = hvd.add_process_set(members)
    return _process_sets[tuple(members)]


def main() -> None:
    """Run the checks of this script, and write the traceback of each, or ""."""
    import paceline.compat.horovod.torch as hvd

    hvd.init()
    found = {}
    for name, function in _checks.items():
        try:
            function()
            found[name] = ""
        except (Exception, pytest.fail.Exception):
            found[name] = traceback.format_exc()
            sys.stderr.write(f"{name}: {found[name]}\n")  # the others may wait for this rank
    Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(found))


def names(file: str) -> list[str]:
    """Return the names of the checks in a file, without importing it."""
    lines = (FOLDER / file).read_text().splitlines()
    return [
        after.removeprefix("def ").partition("(")[0]
        for line, after in pairwise(lines)
        if line == "@check"
    ]


class Results:
    """What the checks of a file said, for each number of ranks."""

    def __init__(self, file: str, folder: Path) -> None:
        self._file, self._folder = file, folder
        self._found: dict[int, list[dict[str, str]]] = {}

    def of(self, name: str, size: int) -> list[str]:
        """Return the traceback of a check on each rank, or ""; runs the job the first time."""
        if size not in self._found:
            self._found[size] = []  # a job that fails is not run again
            import ranks  # of tests/support, which the script does not see

            folder = self._folder / str(size)
            folder.mkdir()
            ranks.run(FOLDER / self._file, folder, ranks=size, timeout=100)
            self._found[size] = [
                json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)
            ]
        assert self._found[size], "the job of these checks has failed; see the first of them"
        return [of_rank[name] for of_rank in self._found[size]]


def passed(results: Results, name: str, size: int) -> None:
    """Assert that a check passed on all ranks."""
    said = results.of(name, size)
    assert said == [""] * size, "\n".join(filter(None, said))
