"""Tables and sentences of a study of ``paceline tune``."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...numbers import counted, duration, elapsed, percent
from ...tuning.tuning_view import (
    COMPLETE,
    FAILED,
    MAX,
    PAUSED,
    RUNNING,
    STOPPED,
    TrialRow,
    TuningView,
)

SHOWN_TRIALS = 10  # in the table
SHOWN_FAILURES = 3  # kinds
_STYLES = {FAILED: "red", RUNNING: "bold", PAUSED: "bright_black", STOPPED: "bright_black"}


def tuning_panel(view: TuningView, most: int = SHOWN_TRIALS) -> Panel:
    """Return the best trials, those that run, and what was found."""
    parts: list[RenderableType] = [Text(head_line(view)), Text(counts_line(view))]
    if view.rows:
        parts += [Text(""), trials_table(view, shown_rows(view, most))]
    parts += [Text(line, style="red") for line in failure_lines(view)]
    if view.importances:
        of = f"; {view.importance_note}" * bool(view.importance_note)
        parts.append(Text(f"\nimportance of the parameters (functional ANOVA{of}):", style="bold"))
        parts += [Text(line) for line in importance_lines(view)]
    elif view.importance_note:
        parts.append(Text(f"\n{view.importance_note}", style="bright_black"))
    if view.gain is not None:
        parts.append(Text(f"\n{gain_sentence(view)}"))
    if lineage := lineage_lines(view):
        parts.append(Text(f"\nhow trial {view.best[0]} was trained:", style="bold"))
        parts += [Text(line) for line in lineage]
    if view.best_command:
        parts.append(Text(f"\nbest: paceline run {view.best_command}"))
    parts += [Text(f"note: {note}", style="yellow") for note in view.notes]
    return Panel(Group(*parts), title=f"Paceline: study {view.name}", expand=False)


def head_line(view: TuningView) -> str:
    """Return what is searched, and how."""
    goals = ", ".join(f"{goal} {name}" for name, goal in zip(view.metrics, view.goals, strict=True))
    return f"{view.command}\n{goals}; {view.search}"


def counts_line(view: TuningView) -> str:
    """Return the numbers of trials by state, and the time left."""
    begun = [row for row in view.rows if row.started is not None]
    parts = [f"{len(begun)} of {counted(view.planned, 'trial')}"]
    states = (COMPLETE, RUNNING, PAUSED, STOPPED, FAILED)
    parts += [f"{count} {state}" for state in states if (count := view.count(state))]
    hours = sum(row.node_hours for row in view.rows)
    if hours >= 0.01:
        parts.append(f"{hours:.2f} node-hours")
    if view.left_s is not None:
        parts.append(f"about {elapsed(view.left_s)} left")
    return "; ".join(parts)


def shown_rows(view: TuningView, most: int) -> list[TrialRow]:
    """Return the rows that are shown: those that run, and the best ones."""
    running = [row for row in view.rows if row.state == RUNNING]
    sign = -1 if view.goals[0] == MAX else 1
    done = [row for row in view.rows if row.state in (COMPLETE, PAUSED, STOPPED)]
    done.sort(
        key=lambda row: (
            row.number not in view.best,
            row.state != COMPLETE,
            -row.rung,
            sign * row.last if row.last is not None else 0.0,
            row.number,
        )
    )
    failed = [row for row in view.rows if row.state == FAILED]
    return [*done[: max(most - len(running), 3)], *running[:most]] or failed[:most]


def trials_table(view: TuningView, rows: Sequence[TrialRow]) -> Table:
    """Return a table with one line for each of the rows."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    has_rungs = any(row.rung for row in view.rows)
    has_steps = any(row.step is not None for row in view.rows)
    has_parents = any(row.generation is not None for row in view.rows)
    headings = ["trial", *view.metrics, *["step"] * has_steps, *["rung"] * has_rungs]
    headings += ["generation", "from"] * has_parents
    for heading in [*headings, "time", *view.parameters]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        mark = "▸" if row.number in view.best else ""
        values = [value_text(value) for value in row.values]
        if not values:
            values = [value_text(row.last), *["-"] * (len(view.metrics) - 1)]
        cells = [f"{mark}{row.number}", *values]
        cells += ["-" if row.step is None else str(row.step)] * has_steps
        cells += [str(row.rung)] * has_rungs
        if has_parents:
            cells += ["-" if one is None else str(one) for one in (row.generation, row.parent)]
        cells.append(duration(row.seconds + view.running.get(row.number, 0.0)))
        cells += [parameter_text(row.parameters.get(name)) for name in view.parameters]
        note = row.failure or ("" if row.state == COMPLETE else row.state)
        note += " (known point)" * row.known
        if row.waits_for:
            note += f" waits for {row.waits_for}: {percent(row.waits)}"
        table.add_row(*cells, note, style=_STYLES.get(row.state))
    return table


def failure_lines(view: TuningView) -> list[str]:
    """Return the kinds of failures, each with a number and an example."""
    kinds: dict[str, list[TrialRow]] = {}
    for row in view.rows:
        if row.failure:
            kinds.setdefault(row.failure, []).append(row)
    return [
        f"{counted(len(rows), 'trial')} failed ({kind}): trial {rows[-1].number}: {rows[-1].reason}"
        for kind, rows in sorted(kinds.items(), key=lambda item: -len(item[1]))[:SHOWN_FAILURES]
    ]


def importance_lines(view: TuningView) -> list[str]:
    """Return the parameters with their shares, the largest first."""
    width = max(map(len, view.importances))
    return [
        f"  {name:{width}}  {share:6.1%}  {'━' * round(30 * share)}"
        for name, share in sorted(view.importances.items(), key=lambda item: -item[1])
    ]


def gain_sentence(view: TuningView) -> str:
    """Return what the search has gained over random points."""
    gain = view.gain
    if gain is None or gain.reason:
        reason = "it was not determined" if gain is None else gain.reason
        return f"Gain over random points at the same budget: can't be told: {reason}"
    metric = view.metrics[0]
    interval = f"95 % interval {value_text(gain.low)} to {value_text(gain.high)}"
    values = (
        f"expected best of {gain.count} trials: {metric} {value_text(gain.best_searched)} "
        f"searched, {value_text(gain.best_random)} random"
    )
    verdict = f"{value_text(gain.difference)} better ({interval})"
    if not gain.decided:
        verdict = f"no difference can be told ({interval})"
    elif gain.difference < 0:
        verdict = f"{value_text(-gain.difference)} worse than random points ({interval})"
    return f"Gain over random points at the same budget: {verdict}; {values}"


def lineage_lines(view: TuningView) -> list[str]:
    """Return the trials that trained the best model one after the other, in a population."""
    if len(view.best) != 1 or view.row(view.best[0]).generation is None:
        return []
    lines = []
    for row in view.ancestry(view.best[0]):
        parameters = ", ".join(
            f"{name} = {parameter_text(value)}" for name, value in row.parameters.items()
        )
        last = "-" if row.step is None else str(row.step)
        value = f"{view.metrics[0]} {value_text(row.last)}"
        lines.append(
            f"  steps {row.first_step + 1} to {last}: trial {row.number}: {parameters}: {value}"
        )
    return lines


def trial_sentence(row: TrialRow, view: TuningView) -> str:
    """Return a trial that ended or paused, in one line."""
    where = f"trial {row.number}"
    parameters = ", ".join(
        f"{name} = {parameter_text(value)}" for name, value in row.parameters.items()
    )
    if row.state == FAILED:
        return f"{where} failed ({row.failure}): {row.reason} ({parameters})"
    if row.state == COMPLETE:
        values = ", ".join(
            f"{name} {value_text(value)}"
            for name, value in zip(view.metrics, row.values, strict=True)
        )
        best = "; the best one until now" if view.best == [row.number] else ""
        return f"{where}: {values} ({parameters}; {duration(row.seconds)}){best}"
    step = f" after step {row.step}" if row.step is not None else ""
    return f"{where} {row.state}{step}: {view.metrics[0]} {value_text(row.last)} ({parameters})"


def value_text(value: float | None) -> str:
    """Return a value of a metric with six digits."""
    return "-" if value is None else f"{value:.6g}"


def parameter_text(value: bool | int | float | str | None) -> str:
    """Return a value of a parameter."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
