"""``paceline top``: show again and again what a running job's rings say, until it ends.

Nothing is written, no lock is kept, and the processor goes to others first.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ...analyze.live.live_view import View, view
from ...report.console import PlainConsole
from ...report.numbers import elapsed
from ...report.terminal.top import EACH, drawn
from ...report.terminal.top import MOST as MOST_RANKS
from ...security.text import printable
from . import live_records
from .running_jobs import RunningJob, find

EVENTS = 200_000  # of all ranks together, that a view is made from
LEAST, MOST = 512, 8192  # ... and of one rank
PLAIN_WIDTH = 100  # where there is no terminal
BESIDE = 14  # lines of a view that are not its table


def top(folder: Path | None, name: str | None, every: float, once: bool, as_json: bool) -> int:
    """Show the job that records into ``folder``, or is called ``name``, or is the only one.

    Raises ValueError where there is no such job, or there are several.
    """
    if not every > 0:
        raise ValueError(f"--every {every:g}: HINT: more than 0 seconds")
    job = find(folder, name)
    os.nice(19)
    pictures = _pictures(job)
    if as_json or once:
        return _lines(job, pictures, every, once, as_json)
    console = PlainConsole()
    if not console.is_terminal:
        return _plainly(job, pictures, every)
    return _on_screen(job, pictures, every, console)


# what is shown


@dataclass(frozen=True)
class Snapshot:
    """One view of the job, and what is to be said beside it."""

    view: View | None
    said: str


def _pictures(job: RunningJob) -> Iterator[Snapshot]:
    """One after the other, as quickly as they are asked for, until the job has ended."""
    shown, most = None, LEAST
    while True:
        try:
            seen = job.snapshot(most)
        except ValueError as mistake:  # the launcher is stopped: it may go on
            yield Snapshot(shown, str(mistake))
            continue
        if seen is None:
            return
        if seen.ending:
            yield Snapshot(shown, "the job is ending: its records are being kept")
            continue
        fresh = _view(job, seen)
        if fresh is not None and fresh.size and most != (wanted := _events(fresh.size)):
            most = wanted  # the first look was a short one
            if shown is None:
                shown = fresh
                continue
        shown = fresh
        yield Snapshot(shown, _silence(seen) or _elsewhere(job, shown))


def _events(size: int) -> int:
    return min(MOST, max(LEAST, EVENTS // size))


def _view(job: RunningJob, seen: live_records.JobSnapshot) -> View | None:
    command = seen.job.get("command") or job.command
    size = sum(seen.job.get("on_each", []))
    return view(seen.tails, command, size, seen.silent_hosts)


def _silence(seen: live_records.JobSnapshot) -> str:
    """Which hosts have not answered, with their ranks."""
    told, first = [], 0
    hosts, on_each = seen.job.get("hosts", []), seen.job.get("on_each", [])
    for host, count in zip(hosts, on_each, strict=True):
        if host in seen.silent_hosts:
            last = first + count - 1
            ranks = f"ranks {first}-{last} are" if count > 1 else f"rank {first} is"
            told.append(f"{host} does not answer: its {ranks} not shown")
        first += count
    return "; ".join(told)


def _elsewhere(job: RunningJob, shown: View | None) -> str:
    if not job.home or shown is None or not shown.missing_ranks:
        return ""
    hint = f"HINT: ssh {job.home} paceline top {job.target}"
    return f"only this host's ranks are shown: the job was started on {job.home}. {hint}"


def _renderable(
    job: RunningJob, picture: Snapshot, width: int, height: int | None = None
) -> RenderableType:
    parts: list[RenderableType] = []
    if picture.view is not None:
        rows = EACH + MOST_RANKS if height is None else max(4, height - BESIDE)
        parts.append(drawn(picture.view, width, rows))
    elif not picture.said:
        parts.append(Text(printable(_nothing_yet(job))))
    if picture.said:
        parts.append(Text(printable(picture.said), style="yellow"))
    return Group(*parts)


def _nothing_yet(job: RunningJob) -> str:
    since = f" {elapsed(time.time() - job.started)} after its start" if job.started else ""
    hint = "" if job.target else ". HINT: a script that does not call paceline.init() has one "
    hint += "" if job.target else "with paceline run --record DIR"
    return f"{' '.join(job.command)}: starting: no rank has a record yet{since}{hint}"


# ways to show it


def _lines(
    job: RunningJob, pictures: Iterator[Snapshot], every: float, once: bool, as_json: bool
) -> int:
    """As JSON, or once. Raises ValueError where the one view can't be had."""
    for picture in pictures:
        if once and picture.view is None and picture.said:
            raise ValueError(picture.said)
        if as_json:
            print(json.dumps(_as_json(job, picture)), flush=True)
        else:
            _print(_renderable(job, picture, _width()))
        if once:
            return 0
        time.sleep(every)
    if once:
        raise ValueError(f"the job has just ended{_hint(job)}")
    return 0


def _as_json(job: RunningJob, picture: Snapshot) -> dict[str, Any]:
    if picture.view is None:
        empty = {"format": "paceline-live", "version": 1, "command": job.command, "step": 0}
        return {**empty, "ranks": [], "now": [], "notes": [picture.said or _nothing_yet(job)]}
    found = picture.view.as_dict()
    return found | {"notes": [*found["notes"], *([picture.said] if picture.said else [])]}


def _plainly(job: RunningJob, pictures: Iterator[Snapshot], every: float) -> int:
    """Into a file or a pipe: view after view."""
    for picture in pictures:
        _print(_renderable(job, picture, _width()))
        print(flush=True)
        time.sleep(every)
    print(f"the job has ended{_hint(job)}", flush=True)
    return 0


def _on_screen(
    job: RunningJob, pictures: Iterator[Snapshot], every: float, console: PlainConsole
) -> int:
    last: View | None = None
    with _ended_by_signals(), Live(console=console, screen=True, auto_refresh=False) as screen:
        for picture in pictures:
            last = picture.view or last  # while a job ends its rings may be gone already
            screen.update(_renderable(job, picture, *console.size), refresh=True)
            time.sleep(every)
    if last is not None:
        console.print(_renderable(job, Snapshot(last, ""), console.width))
    console.print(f"the job has ended{_hint(job)}", style="bold", highlight=False)
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The terminal is restored also where a signal ends us."""

    def end(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, end)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _hint(job: RunningJob) -> str:
    return "" if job.target is None else printable(f". HINT: paceline report {job.target}")


def _width() -> int:
    return PlainConsole().width if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH


def _print(what: RenderableType) -> None:
    PlainConsole(width=_width(), highlight=False).print(what)
