"""Report of one run as tables in the terminal; colours obey NO_COLOR."""

import io
import os
import sys
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...analyze.figures.process_groups import Collective
from ...analyze.figures.report import Report
from ...record.ring.launcher_messages import notify
from ..console import PlainConsole
from ..document import GOOD_EFFICIENCY
from ..document import Table as DocumentTable
from ..exchange_tables import axes_table, blocks_table, exposed_blocks, halos_table, layers_table
from ..numbers import amount, counted, duration, percent, size
from ..sentences import (
    core_wait_sentence,
    memory_warnings,
    noise_scale_sentence,
    outliers,
    peak_sentence,
    pipeline_sentences,
    sentence,
    troubles,
)
from ..state_names import shown_states, state_name
from ..verdict.of_run import verdict_of_run
from . import step_work
from .draw import draw_table, verdict_table
from .roofline import draw_roofline

BAR_COLUMNS = 12
SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"
MAX_LISTED_GROUPS = 8
MAX_LISTED_KINDS = 4  # collectives of one group
MAX_DESCRIBED_LOSSES = 3  # number of losses that are described in a sentence
BACKGROUND, MIN_BACKGROUND = "background", 0.0005  # beside the states; the share that is shown
COLOURS = {
    "useful": "green",
    "input": "yellow",
    "checkpoint": "cyan",
    "validation": "blue",
    "starved": "bright_red",
    "other": "bright_black",
    "bubble": "bright_yellow",
    "wait": "red",
    "transfer": "magenta",
    BACKGROUND: "bright_black",
}
MEANING = {
    "useful": "computing for the model",
    "input": "waiting for a batch",
    "checkpoint": "waiting for a checkpoint",
    "validation": "evaluating",
    "starved": "waiting for a core",
    "other": "in no other state",
    "bubble": "waiting for other stages",
    "wait": "waiting for the last rank",
    "transfer": "after the last rank arrived",
    BACKGROUND: "collectives of other threads",
}
# Tree of efficiencies: name, field of Efficiencies, depth.
EFFICIENCY_TREE = (
    ("parallel efficiency", "parallel", 0),
    ("load balance", "load_balance", 1),
    ("communication efficiency", "communication", 1),
    ("serialisation", "serialisation", 2),
    ("transfer", "transfer", 2),
    ("no checkpoint", "checkpoint", 0),
    ("no validation", "validation", 0),
    ("no wait for input", "input", 0),
    ("no wait for a core", "starved", 0),
    ("no other work", "other", 0),
    ("no pipeline bubble", "bubble", 0),
    ("useful (the product)", "useful", 0),
)


def show(report: Report) -> None:
    """Show the short report to the user, through the launcher if there is one."""
    notify(render(report))


def render(report: Report) -> str:
    """Return the short report as text for stderr.

    On a terminal, the text has the width of the terminal and colours.
    """
    terminal = os.environ.get("PACELINE_TTY") == "1" or sys.stderr.isatty()
    width = int(os.environ.get("PACELINE_WIDTH", 0)) or (None if terminal else 100)
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=terminal, width=width)
    console.print(panel(report, console.width))
    return ("\r\x1b[2K" if terminal else "") + text.getvalue()


def panel(report: Report, width: int = 100, full: bool = False) -> Panel:
    """Return the report. The states' meanings are omitted if they do not fit.

    Args:
        width: Width of the terminal in columns.
        full: Include the tree of efficiencies, the process groups, and the largest losses with one
            sentence each.
    """
    explained = width >= 100 or (len(report.ranks) < 3 and width >= 88)
    parts: list[RenderableType] = [verdict_table(verdict_of_run(report)), Text(), _head(report)]
    if report.window_s is not None:
        parts += [_states(report, explained), Text()]
        if full:
            parts += [
                _tree(report),
                _efficiency_sparkline(report),
                *_step_time_lines(report),
                *_table(axes_table(report)),
                *_groups(report),
                *_table(blocks_table(report), exposed_blocks(report)),
                *_table(halos_table(report)),
                *_table(layers_table(report)),
            ]
            parts += [*_losses(report), *_flops_and_roofline(report, width)]
        else:
            parts += [_efficiencies(report), *(Text(f"{line}.") for line in troubles(report))]
            parts += [Text(f"{line}.") for line in exposed_blocks(report)]
        parts += [Text(f"{line}.") for line in pipeline_sentences(report)]
        parts += [*_core_waits(report), *_loading(report), _recording_overhead(report)]
    if report.noise_scale is not None:
        line = noise_scale_sentence(report.noise_scale)
        parts.append(Text(f"{line[0].upper()}{line[1:]}."))
    peak = peak_sentence(report)
    if peak is not None and (full or report.peaks[0].predicted is not None):
        parts.append(Text(f"{peak[0].upper()}{peak[1:]}."))
    grown = memory_warnings(report)
    parts += [Text(f"{line[0].upper()}{line[1:]}.", style="yellow") for line in grown]
    parts += [Text(f"{doubt}.", style="yellow") for doubt in report.doubts]
    if full and report.confidence < 0.995:
        parts.append(Text(f"confidence {report.confidence:.2f}", style="yellow"))
    since = f" since step {report.first_step}" if report.first_step else ""
    hosts = len(set(report.hosts))
    on = f" on {hosts} nodes" if hosts > 1 else ""
    title = f"Paceline: {counted(report.size, 'rank')}{on}, {counted(report.steps, 'step')}{since}"
    return Panel(Group(*parts), title=title, expand=False)


def _head(report: Report) -> Text:
    text = Text(f"wall time {report.wall_s:.1f} s (start-up {report.startup_s:.1f} s")
    if report.window_s is not None:
        text.append(f", measured {report.window_s:.1f} s without the first step")
    text.append(")")
    if report.samples_per_s is not None:
        text.append(f"   {amount(report.samples_per_s)} samples/s", style="bold")
    return text


def _states(report: Report, explained: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    many = len(report.ranks) > 4
    table.add_column("state")
    table.add_column("mean", justify="right")
    if many:
        for heading in ("minimum", "maximum"):
            table.add_column(heading, justify="right")
    else:
        for rank in report.ranks if len(report.ranks) > 1 else []:
            table.add_column(report.named([rank]), justify="right")
    table.add_column("", min_width=BAR_COLUMNS)
    table.add_column("", style="bright_black", no_wrap=True)
    rows = [(name, [rank[name] for rank in report.states]) for name in shown_states(report.states)]
    if max(report.background, default=0.0) >= MIN_BACKGROUND:
        rows.append((BACKGROUND, report.background))
    for name, shares in rows:
        mean = sum(shares) / len(shares)
        cells = [percent(mean)]
        if many:
            for pick in (min, max):
                share = pick(shares)
                rank = report.ranks[shares.index(share)]
                cells.append(f"{percent(share)} (rank {rank})")
        elif len(shares) > 1:
            cells += [percent(share) for share in shares]
        bar = Text(
            "█" * round(mean * BAR_COLUMNS) or ("▏" if mean > 0 else ""), style=COLOURS[name]
        )
        table.add_row(state_name(report, name), *cells, bar, MEANING[name] if explained else "")
    return table


def _efficiencies(report: Report) -> Text:
    """Return the main efficiencies in two lines, for the end of a run."""
    e = report.efficiencies
    assert e is not None
    text = Text()
    if report.size > 1:
        for name, value in (
            ("parallel efficiency", e.parallel),
            ("load balance", e.load_balance),
            ("communication efficiency", e.communication),
        ):
            sign = {"parallel efficiency": " = ", "load balance": " x "}.get(name, "\n")
            text.append(f"{name} ").append_text(_graded(value)).append(sign)
        text.append(_slowest(report))
    return text


def _tree(report: Report) -> Table:
    """Return the efficiencies as a table, in the form that HPC centres use for POP reports."""
    e = report.efficiencies
    assert e is not None
    table = Table(box=None, pad_edge=False)
    table.add_column("efficiency (POP, multiplicative)")
    table.add_column("")
    table.add_column("", style="bright_black")
    for name, field, depth in EFFICIENCY_TREE:
        value = getattr(e, field)
        if not has_efficiency(report, field):
            continue
        note = _slowest(report) if field == "load_balance" and report.size > 1 else ""
        table.add_row("  " * depth + name, _graded(value), note)
    return table


def has_efficiency(report: Report, field: str) -> bool:
    """Return whether a report shows a field of Efficiencies."""
    if report.size == 1 and field in MULTI_RANK_EFFICIENCIES:
        return False
    if field == "bubble":
        return "bubble" in shown_states(report.states)
    return getattr(report.efficiencies, field, None) is not None


MULTI_RANK_EFFICIENCIES = ("parallel", "load_balance", "communication", "serialisation", "transfer")


def _slowest(report: Report) -> str:
    if report.slowest_rank is None:
        return ""
    if report.slowest_real is False:
        return "no rank is slower than the others by more than chance"
    return (
        f"slowest: {report.named([report.slowest_rank])}, "
        f"{100 * (report.slowest_excess or 0):.1f} % more time outside communication than the mean"
    )


def _graded(value: float) -> Text:
    return Text(f"{value:.2f}", style="bold green" if value >= GOOD_EFFICIENCY else "bold red")


def _efficiency_sparkline(report: Report) -> Text:
    """Return the course of the useful share: one block character per tenth of the steps."""
    shares = [part.efficiencies.useful for part in report.ranges]
    if len(shares) < 3:
        return Text()
    blocks = "".join(
        SPARKLINE_BLOCKS[min(int(share * len(SPARKLINE_BLOCKS)), len(SPARKLINE_BLOCKS) - 1)]
        for share in shares
    )
    first, last = report.ranges[0].first, report.ranges[-1].last
    least, most = (f"{100 * pick(shares):.0f}" for pick in (min, max))
    text = Text("\nuseful over the steps  ").append(blocks, style=COLOURS["useful"])
    return text.append(f"  {least} to {most} %, steps {first} to {last}\n")


def _step_time_lines(report: Report) -> list[Text]:
    """Return the distribution of step times, and the causes of the outliers."""
    times, brief = report.step_times, troubles(report)
    if times is None:
        return [Text(f"{line}.") for line in brief]
    text = f"step time: median {duration(times.median_s)}, 5th to 95th percentile "
    text += f"{duration(times.p5_s)} to {duration(times.p95_s)}"
    if times.outlier_count:
        steps = counted(times.last - times.first + 1, "step")
        text += f"; {counted(times.outlier_count, 'outlier')} in {steps}:"
    lines = [*brief, *outliers(report)[:MAX_DESCRIBED_LOSSES]]
    return [Text(text), *(Text(f"  {_uncapitalize(line)}") for line in lines), Text()]


def _uncapitalize(line: str) -> str:
    return line[0].lower() + line[1:]


def _table(table: DocumentTable | None, lines: Sequence[str] = ()) -> list[RenderableType]:
    """Return a table with sentences below it, and an empty line; nothing without a table."""
    if table is None:
        return []
    return [draw_table(table), *(Text(f"{line}.") for line in lines), Text()]


def _groups(report: Report) -> list[RenderableType]:
    if not report.groups:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("process group", "ranks", "wait", "transfer", "hidden", "collectives"):
        right = heading in ("ranks", "wait", "transfer", "hidden")
        table.add_column(heading, justify="right" if right else "left")
    groups = sorted(report.groups, key=lambda g: -(g.wait + g.transfer))
    for group in groups[:MAX_LISTED_GROUPS]:
        kinds = sorted(group.collectives, key=lambda c: (-(c.wait + c.transfer), -c.bytes))
        named = [_collective(one) for one in kinds[:MAX_LISTED_KINDS]]
        if len(kinds) > MAX_LISTED_KINDS:
            named.append(f"{len(kinds) - MAX_LISTED_KINDS} more")
        shares = (percent(share) for share in (group.wait, group.transfer, group.hidden))
        table.add_row(group.name, str(group.size), *shares, ", ".join(named))
    if more := groups[MAX_LISTED_GROUPS:]:
        members = sum(len(group.ranks) for group in more)
        sums = (
            sum(getattr(group, field) * len(group.ranks) for group in more) / max(members, 1)
            for field in ("wait", "transfer", "hidden")
        )
        name = f"{counted(len(more), 'more group')} (--json)"
        table.add_row(name, "", *map(percent, sums), "mean of their ranks")
    return [table, Text()]


def _collective(one: Collective) -> str:
    """Return the name of a collective with its number, size and bandwidth."""
    if not one.count:  # it began before the window, or its launch is not known
        return one.name
    rate = f", {one.busbw:.2g} GB/s bus" if one.busbw is not None else ""
    return f"{counted(one.count, one.name)} ({size(one.bytes / one.count)}{rate})"


def _losses(report: Report) -> list[RenderableType]:
    told = [loss for loss in report.losses if loss.share >= 0.001][:MAX_DESCRIBED_LOSSES]
    if not told:
        return []
    parts: list[RenderableType] = [Text("The largest losses, of all ranks' time:", style="bold")]
    for i, loss in enumerate(told):
        text = Text(f"{i + 1}. ").append(percent(loss.share), style="bold")
        parts.append(text.append(f": {sentence(loss, report)}"))
    lost = sum(loss.share for loss in report.losses)
    if others := len(report.losses) - len(told):
        rest = percent(lost - sum(loss.share for loss in told))
        parts.append(
            Text(f"   {rest}: {counted(others, 'smaller loss', 'smaller losses')} (--json)")
        )
    assert report.efficiencies is not None
    useful = percent(report.efficiencies.useful)
    parts.append(Text(f"   {percent(lost)}: all losses; {useful} is useful"))
    return [*parts, Text()]


def _flops_and_roofline(report: Report, width: int) -> list[RenderableType]:
    """Return the FLOPs of a step, and the roofline if there is one."""
    parts: list[RenderableType] = [Text(f"{line}.") for line in step_work.sentences(report)]
    if report.roofline is not None:
        drawn = draw_roofline(report.roofline.roofs, report.roofline.points, min(width, 110) - 4)
        parts.append(Text(drawn, no_wrap=True))
    return parts


def _core_waits(report: Report) -> list[Text]:
    said = core_wait_sentence(report)
    return [Text(f"{said}.")] if said else []


def _loading(report: Report) -> list[Text]:
    """Return the CPU use of the loader's workers, and the number of unreadable samples."""
    told = report.loading
    if told is None:
        return []
    kind, plural = ("process", "es") if told.processes else ("thread", "s")
    lines = []
    if told.workers:
        whose, most = "the rank", ""
        if len(report.ranks) > 1:
            whose = "each rank"
            most = f" on average, at most {told.most:.2f} (rank {told.rank})"
        workers = counted(told.workers, f"loader {kind}", f"loader {kind}{plural}")
        lines.append(Text(f"the {workers} of {whose} used {told.cores:.2f} cores{most}"))
    if told.left_out:
        what = f"{counted(told.left_out, 'sample')} could not be read and were skipped"
        lines.append(Text(what, style="yellow"))
    return lines


def _recording_overhead(report: Report) -> Text:
    share = 100 * report.recording_cost
    return Text(f"recording cost {share:.2g} % of the time after start-up (measured)")
