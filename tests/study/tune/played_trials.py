"""Trials that are played in the test's process: a server without processes.

A script is a generator: it yields (step, value) for each report, and returns its exit code.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.record.trial_reports import VARIABLE, Answer, TrialRequest, read_lines
from paceline.report.tuning.tuning_view import TuneListener
from paceline.security.schema import parse_json
from paceline.study.study_nodes import Node, TrialNodes
from paceline.study.tune import journal
from paceline.study.tune.open_study import begin_study, continue_study, fork_study, locked
from paceline.study.tune.searches.registry import make_search, search_class
from paceline.study.tune.trial_folder import TrialFolder
from paceline.study.tune.tune import Runner, load_spec


class KilledError(BaseException):
    """The runner is killed here."""


@dataclass
class Played:
    """A trial that runs: what it was started with, and where its script is."""

    start: Any
    request: TrialRequest
    script: Generator[tuple[int, float], None, int]
    waits_at: int | None = None
    signalled: int = 0
    polls: int = 0  # since it was to pause
    copies_until: int = 0  # poll of the server until which a checkpoint is copied

    @property
    def trial(self) -> int:
        return int(Path(self.start.trial).name)

    @property
    def checkpoint(self) -> Path:
        return Path(self.start.trial) / "checkpoint"


class PlayedServer:
    """Has the interface of ``TrialServer``.

    Attributes:
        log: Trial, words and ranks of each start.
        ends: Trial and exit code of each end.
        most: Largest number of trials that ran at the same time.
        polls_to_pause: Polls after which a trial that is to pause has ended.
    """

    def __init__(self, script: Callable[[Played], Generator[tuple[int, float], None, int]]) -> None:
        self.script, self.running = script, {}
        self.log: list[tuple[int, list[str], int]] = []
        self.ends: list[tuple[int, int]] = []
        self.shares: list[Any] = []
        self.hosts: list[str] = []
        self.most, self.polls_to_pause, self.polls = 0, 0, 0

    def start(self, start: Any) -> None:
        request = parse_json(start.variables[VARIABLE].encode(), TrialRequest, "request")
        played = Played(start, request, iter(()))  # type: ignore[arg-type]
        played.script = self.script(played)
        assert played.trial not in {one.trial for one in self.running.values()}
        self.running[start.number] = played
        self.log.append((played.trial, start.words, start.ranks))
        self.shares.append(start.share)
        self.hosts.append(start.hosts)
        self.most = max(self.most, len(self.running))

    def signal(self, number: int, kind: int) -> None:
        if number in self.running:
            self.running[number].signalled = kind

    def ended(self, timeout_s: float) -> list[tuple[int, int]]:
        found = []
        self.polls += 1
        for number, played in list(self.running.items()):
            code = self._advance(played)
            if code is not None:
                del self.running[number]
                end = json.dumps({"code": code, "seconds": 1.0, "nodes": played.start.nodes})
                played.start.files.end_file.write_text(end)
                self.ends.append((played.trial, code))
                found.append((number, code))
        return found

    def _advance(self, played: Played) -> int | None:
        """Play one report; return the exit code of a script that has ended."""
        if played.signalled:
            return 128 + (2 if played.signalled == signal.SIGINT else 15)
        if played.start.parent and not played.checkpoint.exists():
            if self.polls <= played.copies_until:
                return None
            folder = TrialFolder(played.checkpoint.parent)
            folder.take_checkpoint(TrialFolder(Path(played.start.parent)))
        if played.waits_at is not None:
            answers = read_lines(played.request.answers, Answer, 1 << 20)
            decision = next((a.decision for a in answers if a.step == played.waits_at), None)
            if decision is None or decision == "stop":
                return None
            if decision == "pause":
                played.polls += 1
                return 75 if played.polls > self.polls_to_pause else None
            played.waits_at = None
        try:
            step, value = next(played.script)
        except StopIteration as end:
            return end.value or 0
        line = {"step": step, "values": {"score": str(value) if value != value else value}}
        with Path(played.request.reports).open("a") as file:
            file.write(json.dumps(line) + "\n")
        if played.request.every_step or step in played.request.steps:
            played.waits_at = step
        return None

    def close(self) -> None:
        self.running.clear()


class Writes:
    """Kills the runner at one of its writes to the journal, before or in the middle of it."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count, self.kill_at, self.partial = 0, -1, False
        original = journal._backend

        def backend(path):
            found = original(path)
            append = found.append_logs

            def append_or_die(logs):
                self.count += 1
                if self.count == self.kill_at:
                    if self.partial:
                        with path.open("ab") as file:
                            file.write(b'{"op_code": 4, "wor')
                    raise KilledError
                append(logs)

            found.append_logs = append_or_die
            return found

        monkeypatch.setattr(journal, "_backend", backend)


class Heard(TuneListener):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.rows: list[Any] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def trial_ended(self, row: Any, view: Any) -> None:
        self.rows.append(row)


STUDY = """
[study]
command = "train.py --x {x} --checkpoint {checkpoint}"
metric = "score"
goal = "max"
trials = 6
search = "random"
"""
X = "[parameters.x]\nlow = -3.0\nhigh = 3.0\n"


def write_study(folder: Path, study: str = STUDY, parameters: str = X, **keys: Any) -> Path:
    """Write study.toml; ``keys`` are added to its table [study], or replace lines of it."""
    lines = study.strip().splitlines()
    for key, value in keys.items():
        lines = [line for line in lines if not line.startswith(f"{key} =")]
        lines.insert(1, f"{key} = {json.dumps(value)}")
    path = folder / "study.toml"
    path.write_text("\n".join(lines) + "\n" + parameters)
    return path


def value_of(played: Played, name: str = "--x") -> float:
    """Return the value of a parameter of a trial."""
    words = played.start.words
    return float(words[words.index(name) + 1])


def once(played: Played) -> Generator[tuple[int, float], None, int]:
    """Report the value of a parabola once."""
    yield 1, -((value_of(played) - 1) ** 2)
    return 0


def by_epochs(epochs: int) -> Callable[[Played], Generator[tuple[int, float], None, int]]:
    """Return a script with a checkpoint after each epoch; its value grows with them."""

    def script(played: Played) -> Generator[tuple[int, float], None, int]:
        file = played.checkpoint / "epoch"
        first = int(file.read_text()) if file.exists() else 0
        for epoch in range(first + 1, epochs + 1):
            played.checkpoint.mkdir(exist_ok=True)
            file.write_text(str(epoch))
            yield epoch, value_of(played) * epoch
        return 0

    return script


@contextlib.contextmanager
def killed_at(writes: Writes, number: int) -> Iterator[None]:
    """Kill the runner at a write to the journal, every second time in the middle of it."""
    writes.count, writes.kill_at, writes.partial = 0, number, number % 2 == 0
    with pytest.raises(KilledError):
        yield
    writes.kill_at = -1


def has_study(path: Path) -> bool:
    """Return whether the journal of a study file has a study."""
    return b'"op_code":0' in path.with_suffix(".journal").read_bytes()


def play(
    path: Path,
    server: PlayedServer,
    *,
    continued: bool = False,
    forked: bool = False,
    cores: int = 2,
    nodes: list[Node] | None = None,
    heard: Heard | None = None,
    minutes: float | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Any, bool]:
    """Run a study with played trials; return the opened study and whether it is complete."""
    spec = load_spec(path)
    heard = heard or Heard()
    nodes = nodes or [Node("", cores)]
    trial_nodes = TrialNodes(nodes, "ssh", "the test", spec.table.cores)
    for ranks in search_class(spec).numbers_of_ranks(spec):
        trial_nodes.check(ranks)
    with locked(spec, heard.message):
        begin = fork_study if forked else continue_study if continued else begin_study
        opened = begin(spec, heard.message)
        search = make_search(opened.study, spec)
        runner = Runner(opened, search, trial_nodes, server, heard, minutes, interrupted)
        return opened, runner.run()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition never became true"
        time.sleep(0.02)
