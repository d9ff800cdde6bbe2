"""Short runs of the user's script for ``paceline diagnose``.

Each run is a separate, recorded ``paceline run`` process with a rung (record/experiments/rung.py)
and settings (knobs/settings.py).
"""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ...analyze.records.load_run import Run, load_run
from ...knobs.settings import Setting, write_settings
from ...plurals import counted
from ...record.experiments.rung import RUNG_VARIABLE, Rung
from ...record.ring.states import State
from ...security.files import open_regular
from ...security.text import printable
from . import overlay
from .plan import Deadline

MAX_LOG_BYTES = 1 << 20  # read from the end of a run's output
MINUTE_S = 60.0
LAST_LINES = 6  # of the output of a failed run, shown in the error
# Signals that end a run, each with the time in s that the run has to end its ranks.
END_SIGNALS = ((signal.SIGINT, 6.0), (signal.SIGTERM, 6.0), (signal.SIGKILL, 10.0))
OUT_OF_TIME = "the time budget was used up"


@dataclass(frozen=True)
class RunRequest:
    """The user's request to ``paceline diagnose``.

    Attributes:
        script: The script, same as for ``paceline run``.
        args: Arguments of the script.
        where: Options of ``paceline run`` that select the hosts and how they are reached.
        options: Other options of ``paceline run``.
        ranks: Number of ranks, or None if ``where`` determines it.
        minutes: Time budget in minutes.
        steps: Measured steps of each phase, or None to choose the number from the budget.
        warm: Warm-up steps before the measured ones.
        count: Whether to count the FLOPs of a step.
        settings: Knobs that are set in all runs.
        deadline: When the last run ends; None if no time has been measured yet.
    """

    script: str
    args: list[str]
    where: list[str]
    options: list[str]
    ranks: int | None = None
    minutes: float = 5.0
    steps: int | None = None
    warm: int = 5
    count: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    deadline: Deadline | None = None

    @property
    def typed_options(self) -> list[str]:
        """The options that select the ranks and how they run, as the user typed them."""
        ranks = [] if self.ranks is None else ["-n", str(self.ranks)]
        return [*self.where, *ranks, *self.options]

    @property
    def warming(self) -> int:
        """Number of warm-up steps.

        With the knob "loader-workers" they are increased, so that every worker has started and has
        made two batches before the measurement.
        """
        return self.warm + 2 * int(self.settings.get("loader-workers", 0))


class FailedError(ValueError):
    """A run failed.

    Attributes:
        steps: Number of steps before the failure.
        short: The error in one line.
    """

    def __init__(self, text: str, steps: int, short: str) -> None:
        super().__init__(text)
        self.steps, self.short = steps, short


class OutOfTimeError(ValueError):
    """A run was ended, or not started, because its time was over.

    Attributes:
        run: Record until then, or None.
    """

    def __init__(self, minutes: float, run: Run | None = None) -> None:
        super().__init__(
            f"{OUT_OF_TIME}. HINT: --minutes {math.ceil(2 * minutes)} instead of {minutes:g}"
        )
        self.run = run


class InterruptedRunError(KeyboardInterrupt):
    """The user or the system interrupted a run.

    Attributes:
        run: Record until then, or None.
    """

    def __init__(self, run: Run | None) -> None:
        super().__init__()
        self.run = run


class Runner:
    """Runs the script with records in a temporary folder, which is removed at the end."""

    def __init__(self, asked: RunRequest, say: Callable[[str], None]) -> None:
        self.asked, self.say = asked, say
        self.deadline = asked.deadline or Deadline.after(MINUTE_S * asked.minutes)
        self.runs = 0
        self.threads: list[str] = []

    def __enter__(self) -> "Runner":
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-diagnose-"))
        self.overlay = overlay.Overlay.prepare(self.asked.script, self.asked.args, self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        overlay.remove(self.folder)

    def as_in(self, run: Run) -> None:
        """Let a single rank compute with as many threads as each rank of this run."""
        counts = {int(r.meta["threads"]) for r in run.records if "threads" in r.meta}
        if counts and "--threads" not in self.asked.options:
            self.threads = ["--threads", str(min(counts))]

    def run(
        self,
        alone: bool,
        rung: Rung,
        count: bool = False,
        settings: dict[str, Any] | None = None,
        named: str = "",
        limit_s: float = math.inf,
    ) -> Run:
        """Run the script once and return its record.

        Args:
            alone: Run a single rank instead of all ranks.
            rung: Phases of the run.
            count: Count the FLOPs of a step.
            settings: Knobs that are set in this run, in addition to the requested ones.
            named: Description of the run for the user, instead of the default one.
            limit_s: Maximum duration, if less time than until the deadline is meant.

        Raises:
            FailedError: The script failed.
            OutOfTimeError: The run was ended after ``limit_s`` or at the deadline.
            InterruptedRunError: The user interrupted the run.
            ValueError: The script was stopped.
        """
        if not self.deadline.left_s:
            raise OutOfTimeError(self.asked.minutes)
        self.runs += 1
        record, changes = (self.folder / f"{name}{self.runs}" for name in ("", "overlay-"))
        words = self._words(alone, rung, count, settings or {}, record)
        if self.overlay is not None:
            words = self.overlay.command(changes, words)
        who = "one rank" if alone else "all ranks"
        what = named or f"{counted(rung.steps, 'step')} of each: {', '.join(rung.phases)}"
        self.say(f"run {self.runs}: {who}, {what}")
        log = self.folder / f"{self.runs}.log"
        try:
            code = run_process(words, log, min(limit_s, self.deadline.left_s))
        except KeyboardInterrupt:
            raise InterruptedRunError(_load_partial(record)) from None
        finally:
            overlay.remove(changes)
        if code is None:
            raise OutOfTimeError(self.asked.minutes, _load_partial(record))
        run = load_run(record) if any(record.glob("*.ring")) else None
        stopped = _stopped(run)
        if stopped:
            raise ValueError(f"Paceline stopped the script: {stopped}. HINT: {_KEPT_FILES}")
        if code or run is None:
            steps = min((one.count(State.STEP) for one in run.records), default=0) if run else 0
            last = last_lines(log)
            words_of = "".join(f"\n    {line}" for line in last)
            said = f"the script with {who} ended with exit code {code}:{words_of}"
            raise FailedError(said, steps, error_line(last) or f"exit code {code}")
        return run

    def _words(
        self, alone: bool, rung: Rung, count: bool, settings: dict[str, Any], record: Path
    ) -> list[str]:
        """Return the command of a run."""
        where = one_rank(self.asked.where) if alone else list(self.asked.where)
        if self.asked.ranks is not None or alone:
            where += ["-n", "1" if alone else str(self.asked.ranks)]
        scratch = self.folder / f"scratch-{self.runs}"
        covered = self.overlay.folders if self.overlay is not None else ()
        rung = replace(rung, scratch=str(scratch), covered=covered)
        words = [sys.executable, "-m", "paceline", "run", *where, *self.asked.options]
        words += [*self.threads, "--env", f"{RUNG_VARIABLE}={rung.to_json()}"]
        words += ["--count-flops"] * count
        if settings := {**self.asked.settings, **settings}:
            words += ["--settings", str(self._written(settings))]
        return [*words, "--record", str(record), "--", self.asked.script, *self.asked.args]

    def _written(self, settings: dict[str, Any]) -> Path:
        path = self.folder / f"settings-{self.runs}.toml"
        write_settings(path, {name: Setting(value) for name, value in settings.items()}, {})
        return path


_KEPT_FILES = (
    "let the script write to another folder; paceline diagnose does not change existing files"
)


def one_rank(where: list[str]) -> list[str]:
    """Return the options with only the first host and one rank on it, if they name hosts."""
    found = list(where)
    for at, word in enumerate(where):
        if word == "-H":
            found[at + 1] = where[at + 1].split(",")[0].partition(":")[0] + ":1"
    return found


def _stopped(run: Run | None) -> str:
    told: list[Any] = [record.meta.get("rung", {}) for record in run.records] if run else []
    return next((one["stopped"] for one in told if one.get("stopped")), "")


def run_process(words: list[str], log: Path, limit_s: float) -> int | None:
    """Run a command with its output in ``log``. Return its exit code; None after ``limit_s``.

    The command has its own process group, so that Ctrl-C reaches it once: from here.
    """
    started: list[subprocess.Popen[bytes]] = []
    failed: list[OSError] = []

    def start() -> None:
        try:
            with log.open("w") as file:
                options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                started.append(subprocess.Popen(words, process_group=0, **options))
        except OSError as error:
            failed.append(error)

    # Signals interrupt the main thread only: a process that has started is never lost.
    thread = threading.Thread(target=start)
    try:
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return started[0].wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if thread.ident is not None:
            thread.join()
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that still runs; a further Ctrl-C does so sooner."""
    for kind, timeout_s in END_SIGNALS:
        if process.poll() is not None:
            return
        process.send_signal(kind)
        try:
            process.wait(timeout_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue


def _load_partial(record: Path) -> Run | None:
    """Return the record of a run that was ended; None if there is none that can be read."""
    try:
        return load_run(record) if any(record.glob("*.ring")) else None
    except (ValueError, OSError):
        return None


def last_lines(log: Path) -> list[str]:
    """Return the last lines that a run has printed."""
    with open(open_regular(log), "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - MAX_LOG_BYTES, 0))
        text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    said = [printable(line) for line in text.splitlines()]
    lines = [x for x in said if x.strip() and not x.startswith("paceline: the record is in")]
    return lines[-LAST_LINES:] or ["(the script printed nothing)"]


def error_line(last: list[str]) -> str:
    """Return the last line that names an exception, or ""."""
    return next(
        (x.strip() for x in reversed(last) if re.search(r"\b\w*(Error|Exception)\b", x)), ""
    )
