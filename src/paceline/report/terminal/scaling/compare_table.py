"""A table of two studies."""

import itertools

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ....analyze.scaling.outcomes.compare_studies import SizeChange, StudyComparison
from ...numbers import amount, counted, signed_duration
from ...state_names import STATE_NAMES
from .study_table import SAME


def comparison_panel(found: StudyComparison) -> Panel:
    """Return the sizes of both studies, with the changes that are larger than the noise."""
    parts: list[RenderableType] = [
        Text(f"before: {found.before.folder}\nafter:  {found.after.folder}")
    ]
    for kind, changes in itertools.groupby(found.changes, key=lambda one: one.kind):
        parts += [Text(f"\n{SAME[kind]}", style="bold"), _table(list(changes))]
    for label, keys in (("before", found.only_before), ("after", found.only_after)):
        if keys:
            sizes = ", ".join(f"{counted(ranks, 'rank')} ({kind})" for kind, ranks in keys)
            parts.append(Text(f"Measured only {label}: {sizes}."))
    parts += [Text(line, style="yellow") for line in found.differences]
    single = any(not rate.is_between_runs for one in found.changes for rate in one.throughput)
    if single:
        parts.append(
            Text(
                "Sizes with one run: the interval contains an assumed spread between equal runs. "
                "HINT: paceline scale --continue DIR --minutes N makes further runs",
                style="bright_black",
            )
        )
    return Panel(Group(*parts), title="Paceline: two scaling studies", expand=False)


def _table(changes: list[SizeChange]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    headings = ("ranks", "samples/s before", "after", "change", "95 % interval", "eff.", "after")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for one in changes:
        before, after = one.throughput
        low, high = one.ratio.low, one.ratio.high
        interval = f"{_percent(low)} to {_percent(high)}" if low > 0 and high < 1e3 else "unknown"
        table.add_row(
            str(one.ranks),
            amount(before.value),
            amount(after.value),
            _percent(one.ratio.value),
            interval,
            *("-" if value is None else f"{value:.2f}" for value in one.efficiency),
            _verdict(one),
        )
    return table


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _verdict(one: SizeChange) -> Text:
    if one.is_real is None:
        return Text("too few steps to distinguish it from noise", style="bright_black")
    if not one.is_real:
        return Text("within the noise", style="bright_black")
    better = one.ratio.value > 1
    text = "better" if better else "worse"
    if one.state:
        text += f": {STATE_NAMES[one.state]} {signed_duration(one.state_s)} per step"
    return Text(text, style="bold green" if better else "bold red")
