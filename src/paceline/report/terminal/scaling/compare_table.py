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

SINGLE_RUNS = (
    "Sizes with one run: the interval contains an assumed spread between equal runs. HINT: "
    "paceline scale --continue DIR --minutes N makes further runs"
)


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
    if has_single_runs(found):
        parts.append(Text(SINGLE_RUNS, style="bright_black"))
    return Panel(Group(*parts), title="Paceline: two scaling studies", expand=False)


def _table(changes: list[SizeChange]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    headings = ("ranks", "samples/s before", "after", "change", "95 % interval", "eff.", "after")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for one in changes:
        before, after = one.throughput
        table.add_row(
            str(one.ranks),
            amount(before.value),
            amount(after.value),
            percent_of(one.ratio.value),
            interval_of(one),
            *("-" if value is None else f"{value:.2f}" for value in one.efficiency),
            _styled(one),
        )
    return table


def has_single_runs(found: StudyComparison) -> bool:
    """Return whether a size has one run only in one of the studies."""
    return any(not rate.is_between_runs for one in found.changes for rate in one.throughput)


def percent_of(ratio: float) -> str:
    """Return a ratio as a change: +12.0 %."""
    return f"{100 * (ratio - 1):+.1f} %"


def interval_of(one: SizeChange) -> str:
    """Return the 95 % interval of a size's change."""
    low, high = one.ratio.low, one.ratio.high
    return f"{percent_of(low)} to {percent_of(high)}" if low > 0 and high < 1e3 else "unknown"


def verdict_of(one: SizeChange) -> str:
    """Return whether a size is better or worse, and the state that changed most."""
    if one.is_real is None:
        return "too few steps to distinguish it from noise"
    if not one.is_real:
        return "within the noise"
    text = "better" if one.ratio.value > 1 else "worse"
    if one.state:
        text += f": {STATE_NAMES[one.state]} {signed_duration(one.state_s)} per step"
    return text


def _styled(one: SizeChange) -> Text:
    if not one.is_real:
        return Text(verdict_of(one), style="bright_black")
    return Text(verdict_of(one), style="bold green" if one.ratio.value > 1 else "bold red")
