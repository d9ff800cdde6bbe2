"""``paceline top``: show the state of a running job periodically, from its ring files.

No file is written, no lock is held, and the process runs at the lowest CPU priority.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ...analyze.live.live_view import LiveView, view
from ...plurals import named_ranks
from ...report.console import PlainConsole
from ...report.numbers import elapsed
from ...report.terminal.top import MAX_LISTED_RANKS as MOST_RANKS
from ...report.terminal.top import MAX_RANK_ROWS, render
from ...security.text import printable
from ..linux_processes import exit_on_signal, signals_handled
from . import live_records
from .running_jobs import RunningJob, find

MAX_EVENTS_OF_ALL = 200_000  # maximum number of events of all ranks together in one view
MIN_EVENTS, MAX_EVENTS = 512, 8192  # minimum and maximum number of events of one rank
PLAIN_WIDTH = 100  # columns if the output is not a terminal
LINES_BESIDE_TABLE = 14  # lines of a view in addition to its table


def top(folder: Path | None, name: str | None, every: float, once: bool, as_json: bool) -> int:
    """Show the job that records into ``folder``, or has the name ``name``, or is the only one.

    Args:
        folder: Record folder of the job, or None.
        name: Name of the job, or None.
        every: Interval between two views, in seconds.
        once: Whether to show one view and return.
        as_json: Whether to print each view as one line of JSON.

    Returns:
        The exit code.

    Raises:
        ValueError: There is no such job, or there are several, or ``every`` is not positive.
    """
    if not every > 0:
        raise ValueError(f"--every must be more than 0 seconds; this is {every:g}. HINT: --every 2")
    job = find(folder, name)
    os.nice(19)
    frames = _frames(job)
    if as_json or once:
        return _lines(job, frames, every, once, as_json)
    console = PlainConsole()
    if not console.is_terminal:
        return _plainly(job, frames, every)
    return _on_screen(job, frames, every, console)


# Snapshots


@dataclass(frozen=True)
class Frame:
    """One view of the job.

    Attributes:
        view: The view, or None if no rank has a record yet.
        message: To show below the view, or "".
    """

    view: LiveView | None
    message: str


def _frames(job: RunningJob) -> Iterator[Frame]:
    """Yield snapshots of the job until it has ended. The caller determines the interval."""
    last_view, max_events = None, MIN_EVENTS
    while True:
        try:
            snapshot = job.snapshot(max_events)
        except ValueError as mistake:  # the launcher is suspended and may continue
            yield Frame(last_view, str(mistake))
            continue
        if snapshot is None:
            return
        if snapshot.ending:
            yield Frame(last_view, "the job is ending: Paceline saves its records")
            continue
        new_view = _view(job, snapshot)
        if (
            new_view is not None
            and new_view.size
            and max_events != (wanted := _events(new_view.size))
        ):
            max_events = wanted  # the first snapshot had few events
            if last_view is None:
                last_view = new_view
                continue
        last_view = new_view
        yield Frame(last_view, _silence(snapshot) or _elsewhere(job, last_view))


def _events(size: int) -> int:
    return min(MAX_EVENTS, max(MIN_EVENTS, MAX_EVENTS_OF_ALL // size))


def _view(job: RunningJob, snapshot: live_records.JobSnapshot) -> LiveView | None:
    command = snapshot.job.get("command") or job.command
    size = sum(snapshot.job.get("on_each", []))
    return view(snapshot.tails, command, size, snapshot.silent_hosts)


def _silence(snapshot: live_records.JobSnapshot) -> str:
    """Return a message about the hosts that have not answered, with their ranks, or ""."""
    texts, first = [], 0
    hosts, ranks_per_host = snapshot.job.get("hosts", []), snapshot.job.get("on_each", [])
    for host, count in zip(hosts, ranks_per_host, strict=True):
        if host in snapshot.silent_hosts:
            ranks = named_ranks(range(first, first + count))
            are = "is" if count == 1 else "are"
            texts.append(f"node {host} does not answer: its {ranks} {are} not shown")
        first += count
    return "; ".join(texts)


def _elsewhere(job: RunningJob, shown: LiveView | None) -> str:
    if not job.start_host or shown is None or not shown.missing_ranks:
        return ""
    hint = f"HINT: ssh {job.start_host} paceline top {job.target}"
    return f"only the ranks of this node are shown: the job was started on {job.start_host}. {hint}"


def _renderable(
    job: RunningJob, frame: Frame, width: int, height: int | None = None
) -> RenderableType:
    parts: list[RenderableType] = []
    if frame.view is not None:
        rows = MAX_RANK_ROWS + MOST_RANKS if height is None else max(4, height - LINES_BESIDE_TABLE)
        parts.append(render(frame.view, width, rows))
    elif not frame.message:
        parts.append(Text(printable(_nothing_yet(job))))
    if frame.message:
        parts.append(Text(printable(frame.message), style="yellow"))
    return Group(*parts)


def _nothing_yet(job: RunningJob) -> str:
    since = f" {elapsed(time.time() - job.started)} after its start" if job.started else ""
    hint = "" if job.target else ". HINT: a script that does not call paceline.init() has one "
    hint += "" if job.target else "with paceline run --record DIR"
    return f"{' '.join(job.command)}: starting: no rank has a record yet{since}{hint}"


# Output


def _lines(
    job: RunningJob, frames: Iterator[Frame], every: float, once: bool, as_json: bool
) -> int:
    """Print views as JSON, or a single view. Raises ValueError if no single view is available."""
    for frame in frames:
        if once and frame.view is None and frame.message:
            raise ValueError(frame.message)
        if as_json:
            print(json.dumps(_as_json(job, frame)), flush=True)
        else:
            _print(_renderable(job, frame, _width()))
        if once:
            return 0
        time.sleep(every)
    if once:
        raise ValueError(f"the job has just ended{_hint(job)}")
    return 0


def _as_json(job: RunningJob, frame: Frame) -> dict[str, Any]:
    if frame.view is None:
        empty = {"format": "paceline-live", "version": 1, "command": job.command, "step": 0}
        return {**empty, "ranks": [], "now": [], "notes": [frame.message or _nothing_yet(job)]}
    found = frame.view.as_dict()
    return found | {"notes": [*found["notes"], *([frame.message] if frame.message else [])]}


def _plainly(job: RunningJob, frames: Iterator[Frame], every: float) -> int:
    """Print one view after another, to a file or a pipe."""
    for frame in frames:
        _print(_renderable(job, frame, _width()))
        print(flush=True)
        time.sleep(every)
    print(f"the job has ended{_hint(job)}", flush=True)
    return 0


def _on_screen(
    job: RunningJob, frames: Iterator[Frame], every: float, console: PlainConsole
) -> int:
    last: LiveView | None = None
    with (
        signals_handled(exit_on_signal),
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        for frame in frames:
            last = frame.view or last  # while the job ends, its ring files may be removed
            screen.update(_renderable(job, frame, *console.size), refresh=True)
            time.sleep(every)
    if last is not None:
        console.print(_renderable(job, Frame(last, ""), console.width))
    console.print(f"the job has ended{_hint(job)}", style="bold", highlight=False)
    return 0


def _hint(job: RunningJob) -> str:
    return "" if job.target is None else printable(f". HINT: paceline report {job.target}")


def _width() -> int:
    return PlainConsole().width if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH


def _print(what: RenderableType) -> None:
    PlainConsole(width=_width(), highlight=False).print(what)
