"""The summary as a table in the terminal; colours obey NO_COLOR."""

import io
import os
import sys

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..analyze.states import STATES
from ..analyze.summary import Summary
from ..record.tell import say

GOOD = 0.8  # what POP calls good
BAR = 12
COLOURS = {
    "useful": "green",
    "input": "yellow",
    "checkpoint": "cyan",
    "validation": "blue",
    "other": "bright_black",
    "wait": "red",
    "transfer": "magenta",
}
MEANING = {
    "useful": "computing for the model",
    "input": "waiting for a batch",
    "checkpoint": "standing still for a save",
    "validation": "evaluating",
    "other": "not explained by a state",
    "wait": "for the last rank to arrive",
    "transfer": "after the last one arrived",
}


def show(summary: Summary) -> None:
    """Tell the user, through the launcher where there is one."""
    say(drawn(summary))


def drawn(summary: Summary) -> str:
    """The summary as text for stderr: as wide as the terminal, coloured where that is one."""
    terminal = os.environ.get("PACELINE_TTY") == "1" or sys.stderr.isatty()
    width = int(os.environ.get("PACELINE_WIDTH", 0)) or (None if terminal else 100)
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width)
    console.print(panel(summary, console.width))
    return ("\r\x1b[2K" if terminal else "") + text.getvalue()


def panel(summary: Summary, width: int = 100) -> Panel:
    """The summary; the states' meanings are left out where they would not fit."""
    explained = width >= 100 or (len(summary.ranks) < 3 and width >= 88)
    parts: list[Table | Text] = [_head(summary)]
    if summary.window_s is None:
        parts.append(Text("Fewer than two steps: too few to measure where the time went."))
    else:
        parts += [_states(summary, explained), _efficiencies(summary)]
    parts += [Text(note, style="yellow") for note in _notes(summary)]
    ranks = "1 rank" if summary.size == 1 else f"{summary.size} ranks"
    since = f" since step {summary.first_step}" if summary.first_step else ""
    title = f"Paceline: {ranks}, {summary.steps} steps{since}"
    return Panel(Group(*parts), title=title, expand=False)


def _head(summary: Summary) -> Text:
    text = Text(f"wall time {summary.wall_s:.1f} s (start-up {summary.startup_s:.1f} s")
    if summary.window_s is not None:
        text.append(f", measured {summary.window_s:.1f} s without the first step")
    text.append(")")
    if summary.samples_per_s is not None:
        text.append(f"   {summary.samples_per_s:,.0f} samples/s", style="bold")
    return text


def _states(summary: Summary, explained: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    many = len(summary.ranks) > 4
    table.add_column("state")
    table.add_column("mean", justify="right")
    if many:
        for heading in ("least", "most"):
            table.add_column(heading, justify="right")
    else:
        for rank in summary.ranks if len(summary.ranks) > 1 else []:
            table.add_column(f"rank {rank}", justify="right")
    table.add_column("", min_width=BAR)
    table.add_column("", style="bright_black", no_wrap=True)
    for name in STATES:
        shares = [rank[name] for rank in summary.states]
        mean = sum(shares) / len(shares)
        cells = [_percent(mean)]
        if many:
            for pick in (min, max):
                share = pick(shares)
                rank = summary.ranks[shares.index(share)]
                cells.append(f"{_percent(share)} (rank {rank})")
        elif len(shares) > 1:
            cells += [_percent(share) for share in shares]
        bar = Text("█" * round(mean * BAR) or ("▏" if mean > 0 else ""), style=COLOURS[name])
        label = name if summary.clocks_aligned or name != "transfer" else "wait or transfer"
        table.add_row(label, *cells, bar, MEANING[name] if explained else "")
    return table


def _efficiencies(summary: Summary) -> Text:
    e = summary.efficiencies
    assert e is not None
    text = Text("\n")
    if summary.size > 1:
        for name, value in (
            ("parallel efficiency", e.parallel),
            ("load balance", e.load_balance),
            ("communication efficiency", e.communication),
        ):
            sign = {"parallel efficiency": " = ", "load balance": " x "}.get(name, "\n")
            style = "bold green" if value >= GOOD else "bold red"
            text.append(f"{name} ").append(f"{value:.2f}", style=style).append(sign)
        text.append(
            f"slowest: rank {summary.slowest_rank}, "
            f"{100 * (summary.slowest_excess or 0):.1f} % more time outside communication "
            "than the mean\n"
        )
    text.append(
        f"recording cost {100 * summary.recording_cost:.2g} % of the time after start-up (measured)"
    )
    return text


def _notes(summary: Summary) -> list[str]:
    notes = []
    if summary.missing_ranks:
        ranks = ", ".join(map(str, summary.missing_ranks))
        notes.append(f"No record came from rank {ranks}: the figures leave it out.")
    if summary.lost_events:
        notes.append("The run was longer than the record holds: the figures are of its end.")
    if summary.unmatched_collectives:
        notes.append(
            f"{summary.unmatched_collectives} collectives lack a rank's record; their waits are "
            "booked by the ranks that are there."
        )
    if not summary.clocks_aligned:
        notes.append("Clocks of several hosts are not aligned yet: waits are not told apart.")
    return notes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
