"""Time by line of the script, as a table and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ....analyze.diagnosis.line_profile import (
    Activity,
    Doing,
    LineProfile,
    LineTime,
    SampledLine,
    WorkerLine,
)
from ...numbers import percent

MAX_LINES, MAX_JSON_LINES = 10, 200  # lines of the script that are shown
MIN_LINE_SHARE = 0.01  # of a step: lines with less are not shown in the terminal
MIN_OF_LINE = 0.25  # of a line's time: smaller parts are not named
MIN_RANK_DIFFERENCE = 0.05  # of a step: then a line's time on single ranks is shown


def render_lines(profile: LineProfile) -> list[RenderableType]:
    """Render the lines with most time, and those of the loader workers."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("Time by line, of a step's time", ratio=3, no_wrap=True, overflow="ellipsis")
    for heading in ("own", "with calls"):
        table.add_column(heading, justify="right", no_wrap=True, width=10)
    table.add_column("doing", ratio=2)
    for one in profile.lines()[:MAX_LINES]:
        if one.share >= MIN_LINE_SHARE:
            shares = (percent(one.share), percent(one.inclusive_share))
            doing = describe_doing(one) + describe_ranks(profile.ranks, one)
            table.add_row(_place(one.line), *shares, doing)
    workers = [one for one in profile.worker_lines()[:MAX_LINES] if one.share >= MIN_LINE_SHARE]
    if workers:
        table.add_row("in loader workers, of their time")
    for worker in workers:
        doing = describe_worker(worker)
        table.add_row(_place(worker.line), percent(worker.share), "", doing)
    return [table]


def _place(line: SampledLine) -> str:
    file = line.file.rpartition("/")[2]
    return f"  {file}:{line.line} {line.function.rpartition('.')[2]}: {line.code}"


def describe_doing(one: LineTime) -> str:
    """Return what most of a line's time went to."""
    main = [
        doing
        for doing, share in one.doing.items()
        if share >= MIN_OF_LINE * one.share or doing == one.main_activity
    ]
    text = ", ".join(main)
    named = any(doing in Activity for doing in main if doing != Doing.COLLECTIVE)
    return f"{text} {_short(one.what)}".strip() if named else text


def describe_worker(one: WorkerLine) -> str:
    """Return what a loader worker did in a line."""
    return f"{one.doing} {_short(one.what)}".strip()


def _short(what: str) -> str:
    """Return the end of a path or of a function's name."""
    return what.rpartition("/")[2] if "/" in what else ".".join(what.split(".")[-2:])


def describe_ranks(ranks: list[int], one: LineTime) -> str:
    """Say on which rank a line takes longer than on the others."""
    most = max(range(len(ranks)), key=lambda i: one.own[i])
    others = [own for i, own in enumerate(one.own) if i != most]
    if not others or one.own[most] - max(others) < MIN_RANK_DIFFERENCE:
        return ""
    return f"; rank {ranks[most]} {percent(one.own[most])}, others up to {percent(max(others))}"


def lines_as_json(profile: LineProfile | None) -> list[dict[str, Any]] | None:
    """Return the lines that take time, largest first; None if nothing was sampled."""
    if profile is None:
        return None
    waited = {
        line: {rank: lines[line] for rank, lines in profile.waited.items() if line in lines}
        for line in {line for lines in profile.waited.values() for line in lines}
    }
    found = [
        {
            **asdict(one.line),
            "in_workers": False,
            "share": one.share,
            "inclusive": one.inclusive_share,
            "doing": {str(doing): share for doing, share in one.doing.items()},
            "what": one.what,
            "ranks": {str(r): own for r, own in zip(profile.ranks, one.own, strict=True)},
            "waited_for": {str(r): share for r, share in waited.get(one.line, {}).items()},
            "executions_a_step": one.executions,
        }
        for one in profile.lines()[:MAX_JSON_LINES]
    ]
    return found + [
        {
            **asdict(worker.line),
            "in_workers": True,
            "share": worker.share,
            "doing": {str(worker.doing): worker.share},
            "what": worker.what,
        }
        for worker in profile.worker_lines()[:MAX_JSON_LINES]
    ]
