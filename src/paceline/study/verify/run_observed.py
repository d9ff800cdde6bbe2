"""Runs of the user's script for ``paceline verify``: each a ``paceline run`` whose ranks observe
their training (observe).
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...launch.job import Job, check, preloads
from ...observe.facts.ranks import RankFacts, read_facts
from ...observe.settings import NOT_SHARED, VARIABLE, VerifySettings
from ...observe.user_lines import is_users_file, place
from ...report.numbers import elapsed
from ...security.files import open_regular
from ...security.shared_folder import write_token
from ..script_runs.launcher_server import MODULES, LauncherServer
from ..script_runs.run_process import MAX_LOG_BYTES, error_line, last_lines
from ..trials import ScriptRequest, Trials, TrialSpec, on_first_host

MAX_RANKS = 1 << 16
FIRST_GUESS = 4  # runs of a script that saves no checkpoint
WHOLE_PASS = 1 << 30  # batches: passes are not shortened
CALL = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Imported once for all runs.
OBSERVED = (
    "paceline.cli",
    "paceline.record.hooks.torch_patches",
    "paceline.observe.training_observer",
)
# What a run prints whose rank has not enough memory: torch, the system, the launcher.
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|(can't|cannot) allocate memory|signal 9\b",
    re.IGNORECASE,
)


class RunFailedError(ValueError):
    """A run failed.

    Attributes:
        short: The error in one line.
        calls: Function and "FILE:LINE" of the calls that failed, as far as they were printed, the
            innermost last.
        is_out_of_memory: Whether a rank had not enough memory.
    """

    def __init__(self, text: str, short: str, calls: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.short, self.calls = short, list(calls)
        self.is_out_of_memory = _NO_MEMORY.search(text) is not None

    @property
    def lines(self) -> list[str]:
        """The lines of the user's code, the innermost first."""
        return [line for _, line in reversed(self.calls) if is_users_file(line.rpartition(":")[0])]


class ObservedRuns(Trials):
    """Runs the script in a temporary folder, which is removed at the end.

    Args:
        asked: The request.
        say: Receives what happens now.

    Attributes:
        rest: Number of runs that are expected after the present one.
    """

    def __init__(self, asked: ScriptRequest, say: Callable[[str], None]) -> None:
        super().__init__(asked, say, "paceline-verify-")
        self.server = LauncherServer(_modules(asked))
        self._number, self._start_s = 0, time.monotonic()
        self.rest = FIRST_GUESS

    def _announce(self, what: str) -> None:
        """Say which run begins, of how many, and how long all of them will take.

        Before the first one, that is the time limit.
        """
        taken_s, done = time.monotonic() - self._start_s, self._number
        self._number, self.rest = done + 1, max(self.rest - 1, 0)
        number = f"run {self._number} of about {self._number + self.rest}"
        if not done:
            number += f", at most {elapsed(60 * self.asked.minutes)} to the end"
        else:
            left_s = min(taken_s / done * (1 + self.rest), self.deadline.left_s)
            number += f", about {elapsed(left_s)} to the end"
        self.say(f"{what} ({number})")

    def run(
        self,
        name: str,
        what: str,
        settings: VerifySettings,
        ranks: int | None = None,
        files_of: str = "",
        limit_s: float = math.inf,
    ) -> list[RankFacts]:
        """Run the script once, and return the facts of its ranks.

        Args:
            name: Name of the run's folder.
            what: Description of the run for the user.
            settings: Settings of the run; its folders are set here.
            ranks: Number of ranks, if not all.
            files_of: Name of an earlier run whose files the script finds.
            limit_s: Maximum duration, if less than the rest of the time budget is meant.

        Raises:
            RunFailedError: The script failed, or its time was over.
            ValueError: Not all nodes share the folder of the runs.
        """
        folder = self.folder / name
        if not self.deadline.left_s:
            raise RunFailedError("the time was over before this run", "no time left")
        folder.mkdir()
        settings = replace(
            settings,
            folder=str(folder),
            covered=self.covered,
            token=write_token(folder),
        )
        log = self.folder / f"{name}.log"
        spec = TrialSpec(
            folder / "record",
            log,
            ["--env", f"{VARIABLE}={settings.to_json()}"],
            ranks=ranks,
            where=None if ranks is None else on_first_host(self.asked.where, ranks),
            changes=files_of or name,
            limit_s=limit_s,
        )
        self._announce(what)
        code = self.run_trial(spec).code
        self.remove(folder / "record")
        found = _facts_in(folder)
        ended = {one.ended for one in found}
        # A rank that fails after others have reached the limit has lost its peers.
        if found and (ended <= {"limit", "script"} or "limit" in ended):
            return found
        last = last_lines(log)
        _check_shared(last)
        text = "".join(f"\n    {line}" for line in last)
        if code is None:
            raise RunFailedError(f"the time was over:{text}", "the time was over")
        short = error_line(last) or f"exit code {code}"
        calls = _failed_calls(log)
        raise RunFailedError(f"the script ended with exit code {code}:{text}", short, calls)

    def clear(self, name: str) -> None:
        """Remove what a failed run has left."""
        self.remove(self.folder / name)
        self.remove_changes(name)


def _modules(asked: ScriptRequest) -> list[str]:
    """Return the modules that all runs import, as far as they do not depend on the script."""
    job = Job(name=asked.script, module="-m" in asked.options, fresh="--fresh" in asked.options)
    try:
        found = preloads(job, check(job))
    except ValueError:
        return []  # the first run has the same error
    return [*MODULES, *found, *OBSERVED] if found else []


def _failed_calls(log: Path) -> list[tuple[str, str]]:
    """Return the calls of the first traceback in a log."""
    found: list[tuple[str, str]] = []
    with open(open_regular(log), errors="replace") as file:
        lines = file.read(MAX_LOG_BYTES).splitlines()
    for line in lines:
        if "Traceback (most recent call last)" in line and found:
            break
        if (match := CALL.search(line)) is not None:
            found.append((match[3], place(match[1], int(match[2]))))
    return found


def _check_shared(last: list[str]) -> None:
    """Raise ValueError if a rank's node does not share the folder of the runs."""
    for line in last:
        _, found, rest = line.partition(NOT_SHARED)
        if found:
            raise ValueError(f"{found.removeprefix('paceline: ')}{rest}")


def _facts_in(folder: Path) -> list[RankFacts]:
    """Return the facts of all ranks, in order; those before the first that has none."""
    found: list[RankFacts] = []
    while len(found) < MAX_RANKS:
        try:
            found.append(read_facts(folder, len(found)))
        except OSError:
            return found
        if len(found) >= found[0].size:
            return found
    return found
