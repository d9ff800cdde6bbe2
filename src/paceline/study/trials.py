"""Trials: runs of the user's script with different settings, for commands that compare them.

A trial is a separate, usually recorded ``paceline run`` process. What the script writes goes to a
scratch folder where the system allows it (security/overlay.py). A trial ends with an exit code,
at its time limit, or with Ctrl-C; its processes have then ended.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from ..analyze.records.load_run import Run, load_run
from ..knobs.settings import Setting, write_settings
from ..record.experiments.protect_files import KEPT_FILES_HINT
from ..record.experiments.protected_run import STEP_LIMIT_VARIABLE, StepLimit
from ..record.ring.states import State
from ..record.watch.seed_shift import VARIABLE as SEED_SHIFT
from ..security.overlay import VARIABLE, Overlay
from ..security.processes import python_command
from ..security.removal import TemporaryFolder
from .script_runs.launcher_server import LauncherServer
from .script_runs.run_process import (
    MINUTE_S,
    Deadline,
    error_line,
    last_lines,
    launcher_line,
    run_processes,
)

K = TypeVar("K")
SEED = "{seed}"  # in the arguments of a script: the number of the run's seed
NODE_LOCAL = Path("/tmp")  # for changes, if TMPDIR is on a file system that cannot keep them


@dataclass(frozen=True)
class ScriptRequest:
    """The user's request to a command that runs a script several times.

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


@dataclass(frozen=True)
class TrialSpec:
    """What one trial runs, besides what the request says.

    Attributes:
        record: Folder of its record; None: it is not recorded.
        log: File for its output.
        options: Further options of ``paceline run``.
        ranks: Number of ranks; None: that of the request.
        where: Hosts and how they are reached; None: those of the request.
        args: Arguments of the script; None: those of the request.
        settings: Knobs that are set.
        changes: Name of the folder for what the script writes to covered folders, which a later
            trial may find there; "": the changes are removed after the trial.
        limit_s: Maximum duration, if less than until the deadline is meant.
    """

    record: Path | None
    log: Path
    options: list[str] = field(default_factory=list)
    ranks: int | None = None
    where: list[str] | None = None
    args: list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    changes: str = ""
    limit_s: float = math.inf


@dataclass(frozen=True)
class TrialFailure:
    """How a trial failed.

    Attributes:
        text: Exit code and the last lines of the output.
        short: The error in one line.
        steps: Number of steps before the failure.
    """

    text: str
    short: str
    steps: int = 0


@dataclass(frozen=True)
class Trial:
    """A trial that ended.

    Attributes:
        code: Exit code; None: it was ended at its time limit.
        took_s: Wall time.
        started: When it started (s since 1970).
    """

    spec: TrialSpec
    code: int | None
    took_s: float
    started: float

    def load(self) -> Run | None:
        """Return the record; None if it has none. Raises ValueError, OSError if it is damaged."""
        record = self.spec.record
        return load_run(record) if record is not None and any(record.glob("*.ring")) else None

    def load_partial(self) -> Run | None:
        """Return the record of a trial that was ended early; None if none can be read."""
        try:
            return self.load()
        except (ValueError, OSError):
            return None

    def finished_record(self, who: str, *, may_end_early: bool = False) -> Run:
        """Return the record of a trial that did not fail.

        Args:
            who: The ranks, in words.
            may_end_early: Whether a trial that was ended at its time limit has a result.

        Raises:
            NoResultError: The trial failed, or its record can't be read.
        """
        try:
            record = self.load()
        except (ValueError, OSError) as error:
            raise NoResultError(f"the record can't be read: {error}") from None
        if stopped := self.stopped(record):
            raise NoResultError(stopped)
        if self.code is None and not may_end_early:
            raise NoResultError(f"it took longer than {self.spec.limit_s:.0f} s")
        failure = self.failure(record, who)
        if failure is not None and (self.code is not None or record is None):
            raise NoResultError(failure.short, failure.text)
        assert record is not None, "a trial without a record has failed"
        return record

    def stopped(self, run: Run | None) -> str:
        """Return that Paceline stopped the script to protect a file of the user, and why; or ""."""
        for record in run.records if run else []:
            if why := record.meta.get("rung", {}).get("stopped"):
                return f"Paceline stopped the script: {why}. HINT: {KEPT_FILES_HINT}"
        return ""

    def failure(self, run: Run | None, who: str) -> TrialFailure | None:
        """Return how the trial failed, or None.

        Args:
            run: Its record, which a trial that was to be recorded must have.
            who: The ranks, in words.
        """
        if self.code is None:
            return TrialFailure("the time was over", "the time was over", done_steps(run))
        if not self.code and (run is not None or self.spec.record is None):
            return None
        last = last_lines(self.spec.log)
        words = "".join(f"\n    {line}" for line in last)
        text = f"the script with {who} ended with exit code {self.code}:{words}"
        short = error_line(last) or launcher_line(last) or f"exit code {self.code}"
        return TrialFailure(text, short, done_steps(run))


class NoResultError(ValueError):
    """A trial failed, or its record cannot be used.

    Attributes:
        text: The failure with the last lines of the output; "" if the message is all of it.
    """

    def __init__(self, short: str, text: str = "") -> None:
        super().__init__(short)
        self.text = text


class InterruptedTrialError(KeyboardInterrupt):
    """The user or the system interrupted a trial."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    @functools.cached_property
    def run(self) -> Run | None:
        """Its record until then."""
        return self._trial.load_partial()


class Trials:
    """Trials of one script.

    Args:
        asked: The request.
        say: Receives what happens now.
        prefix: Beginning of the name of a temporary folder, which is removed at the end.
        kept: Folder of records and logs that remain, if there is one.

    Attributes:
        folder: The temporary folder.
        overlay: Covers the folders that the script writes to, or None if that is not possible.
        server: Starts the runs, so that torch is imported once for all; None: it is for each.
        deadline: When the last run ends.
    """

    folder: Path
    overlay: Overlay | None
    server: LauncherServer | None = None

    def __init__(
        self,
        asked: ScriptRequest,
        say: Callable[[str], None],
        prefix: str,
        kept: Path | None = None,
    ) -> None:
        self.asked, self.say = asked, say
        self.deadline = Deadline.after(MINUTE_S * asked.minutes)
        self._prefix, self._count = prefix, 0
        self._kept = () if kept is None else (kept,)

    def __enter__(self) -> Self:
        self._temporary = TemporaryFolder(self._prefix)
        self.folder = self._temporary.path
        for parent in dict.fromkeys((self.folder.parent, NODE_LOCAL)):
            self._changes = TemporaryFolder(self._prefix, parent)
            found = Overlay.prepare(
                self.asked.script, self.asked.args, self._changes.path, self.folder, *self._kept
            )
            self.overlay = found
            if found is not None:
                break
            self._changes.remove()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.close()
        self._changes.remove()
        self._temporary.remove()

    def remove(self, path: Path) -> None:
        """Remove a folder of the trials."""
        self._temporary.remove_inside(path)

    def remove_changes(self, name: str) -> None:
        """Remove what a script has written to covered folders. name: ``TrialSpec.changes``."""
        if self.overlay is not None:
            self._changes.remove_inside(self._changes.path / name)

    @property
    def covered(self) -> tuple[str, ...]:
        """Folders that the overlay covers."""
        return self.overlay.folders if self.overlay is not None else ()

    def run_trial(self, spec: TrialSpec) -> Trial:
        """Run one trial. Raises InterruptedTrialError: the user interrupted it."""
        return self.run_trials([spec])[0]

    def run_trials(self, specs: Sequence[TrialSpec]) -> list[Trial]:
        """Run trials at the same time, on parts of the machine or of the hosts that differ.

        Raises:
            InterruptedTrialError: The user interrupted them; all have ended.
        """
        changes, commands = [], []
        for spec in specs:
            self._count += 1
            changes.append(spec.changes or f"{self._count}")
            commands.append((self._command(spec, changes[-1]), spec.log))
        limit_s = min(self.deadline.left_s, *(spec.limit_s for spec in specs))
        started, before = time.time(), time.monotonic()
        try:
            codes = run_processes(commands, limit_s, self.server)
        except KeyboardInterrupt:
            took_s = time.monotonic() - before
            raise InterruptedTrialError(Trial(specs[0], None, took_s, started)) from None
        finally:
            for spec, name in zip(specs, changes, strict=True):
                if not spec.changes:
                    self.remove_changes(name)
        return [
            Trial(spec, code, took_s, started)
            for spec, (code, took_s) in zip(specs, codes, strict=True)
        ]

    def _command(self, spec: TrialSpec, changes: str) -> list[str]:
        """Return the command of a trial. changes: Name of the folder for what it writes."""
        asked = self.asked
        where = asked.where if spec.where is None else spec.where
        ranks = spec.ranks or asked.ranks
        count = [] if ranks is None else ["-n", str(ranks)]
        words = python_command("-m", "paceline", "run", *where, *count, *asked.options)
        words += spec.options
        if self.overlay is not None:
            request = self.overlay.request(self._changes.path / changes)
            words += ["--env", f"{VARIABLE}={request}"]
        if spec.settings:
            path = self.folder / f"settings-{self._count}.toml"
            write_settings(
                path, {name: Setting(value) for name, value in spec.settings.items()}, {}
            )
            words += ["--settings", str(path)]
        words += [] if spec.record is None else ["--record", str(spec.record)]
        return [*words, "--", asked.script, *(asked.args if spec.args is None else spec.args)]


def seed_options(args: Sequence[str], seed: int) -> list[str]:
    """Return the options of ``paceline run`` for a run with another seed.

    A script without {seed} in its arguments gets it by ``PACELINE_SEED_SHIFT``.
    """
    return [] if any(SEED in word for word in args) else ["--env", f"{SEED_SHIFT}={seed}"]


def step_limit_options(
    trials: Trials, steps: int, scratch: Path, branches: bool = False
) -> list[str]:
    """Return the options of ``paceline run`` for a run with a ``StepLimit``."""
    limit = StepLimit(steps, str(scratch), trials.covered, branches)
    return ["--env", f"{STEP_LIMIT_VARIABLE}={limit.to_json()}"]


def done_steps(run: Run | None) -> int:
    """Return the number of steps that every rank has done; 0 without a record."""
    return min((record.count(State.STEP) for record in run.records), default=0) if run else 0


def on_first_host(where: Sequence[str], ranks: int) -> list[str]:
    """Return the options with only the first host and some ranks on it, if they name hosts."""
    words = list(where)
    if "-H" in words:
        hosts = words.index("-H") + 1
        words[hosts] = words[hosts].split(",")[0].partition(":")[0] + f":{ranks}"
    return words


def in_turn(keys: Sequence[K], number: int) -> list[K]:
    """Return the order of what is compared in a round; every second round is backwards.

    A machine that warms up or cools down then affects all of them equally.
    """
    return list(keys) if number % 2 == 0 else list(reversed(keys))


def rounds(unfinished: Callable[[], Sequence[K]], most: int) -> Iterator[list[K]]:
    """Yield the keys of each round in their order: those that are unfinished when it begins.

    Args:
        unfinished: Returns the keys that need more trials.
        most: Maximum number of rounds.
    """
    for number in range(most):
        keys = unfinished()
        if not keys:
            return
        yield in_turn(keys, number)
