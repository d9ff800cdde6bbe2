"""Runs of the user's script for ``paceline verify``: each a ``paceline run`` whose ranks observe
their training (record/training).
"""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from ...record.training.facts import RankFacts
from ...record.training.facts_file import read_facts
from ...record.training.settings import VARIABLE, VerifySettings
from ..diagnose import overlay
from ..diagnose.run_script import MINUTE_S, error_line, last_lines, one_rank, run_process

MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class VerifyRequest:
    """The user's request to ``paceline verify``.

    Attributes:
        script: The script, same as for ``paceline run``.
        args: Arguments of the script.
        where: Options of ``paceline run`` that select the hosts and how they are reached.
        options: Other options of ``paceline run``.
        ranks: Number of ranks, or None if ``where`` determines it.
        minutes: Time budget of all runs, in minutes.
    """

    script: str
    args: list[str]
    where: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    ranks: int | None = None
    minutes: float = 5.0


class RunFailedError(ValueError):
    """A run failed.

    Attributes:
        short: The error in one line.
    """

    def __init__(self, text: str, short: str) -> None:
        super().__init__(text)
        self.short = short


class ObservedRuns:
    """Runs the script in a temporary folder, which is removed at the end.

    Args:
        asked: The request.
        say: Receives what happens now.
    """

    def __init__(self, asked: VerifyRequest, say: Callable[[str], None]) -> None:
        self.asked, self.say = asked, say
        self._deadline_s = time.monotonic() + MINUTE_S * asked.minutes

    def __enter__(self) -> "ObservedRuns":
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-verify-"))
        self.overlay = overlay.Overlay.prepare(self.asked.script, self.asked.args, self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        overlay.remove(self.folder)

    @property
    def left_s(self) -> float:
        """Seconds of the time budget that are left."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    def run(
        self,
        name: str,
        what: str,
        settings: VerifySettings,
        is_alone: bool = False,
        files_of: str = "",
        limit_s: float = math.inf,
    ) -> list[RankFacts]:
        """Run the script once, and return the facts of its ranks.

        Args:
            name: Name of the run's folder.
            what: Description of the run for the user.
            settings: Settings of the run; its folders are set here.
            is_alone: Run one rank instead of all.
            files_of: Name of an earlier run whose files the script finds.
            limit_s: Maximum duration, if less than the rest of the time budget is meant.

        Raises:
            RunFailedError: The script failed, or its time was over.
        """
        folder, files = self.folder / name, self.folder / "files" / (files_of or name)
        if not self.left_s:
            raise RunFailedError("the time was over before this run", "no time left")
        covered = self.overlay.folders if self.overlay is not None else ()
        settings = replace(
            settings, folder=str(folder), scratch=str(files / "scratch"), covered=covered
        )
        words = self._words(settings, is_alone)
        if self.overlay is not None:
            words = self.overlay.command(files / "overlay", words)
        folder.mkdir()
        files.mkdir(parents=True, exist_ok=True)
        self.say(what)
        log = self.folder / f"{name}.log"
        code = run_process(words, log, min(limit_s, self.left_s))
        shutil.rmtree(folder / "record", ignore_errors=True)
        found = _facts_in(folder)
        ended = {one.ended for one in found}
        # A rank that fails after others have reached the limit has lost its peers.
        if found and (ended <= {"limit", "script"} or "limit" in ended):
            return found
        last = last_lines(log)
        text = "".join(f"\n    {line}" for line in last)
        if code is None:
            raise RunFailedError(f"the time was over:{text}", "the time was over")
        short = error_line(last) or f"exit code {code}"
        raise RunFailedError(f"the script ended with exit code {code}:{text}", short)

    def clear(self, name: str) -> None:
        """Remove what a failed run has left."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        overlay.remove(self.folder / "files" / name)

    def _words(self, settings: VerifySettings, is_alone: bool) -> list[str]:
        """Return the command of a run."""
        asked = self.asked
        where = one_rank(asked.where) if is_alone else list(asked.where)
        if asked.ranks is not None or is_alone:
            where += ["-n", "1" if is_alone else str(asked.ranks)]
        words = [sys.executable, "-m", "paceline", "run", *where, *asked.options]
        words += ["--env", f"{VARIABLE}={settings.to_json()}"]
        record = str(Path(settings.folder) / "record")
        return [*words, "--record", record, "--", asked.script, *asked.args]


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
