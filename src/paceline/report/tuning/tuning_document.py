"""A study of ``paceline tune`` as it is shown in the terminal and on a page."""

from collections.abc import Iterator, Sequence
from typing import Any

from .. import document as doc
from ..numbers import counted, duration, elapsed, percent
from .tuning_view import COMPLETE, MAX, PAUSED, RUNNING, STOPPED, TrialRow, TuningView
from .tuning_view import FAILED as TRIAL_FAILED

SHOWN_TRIALS = 10  # in the table of the terminal
MAX_ROWS = 200  # in that of a page
SHOWN_FAILURES = 3  # kinds
_STYLES = {TRIAL_FAILED: doc.FAILED, RUNNING: doc.STRONG, PAUSED: doc.MUTED, STOPPED: doc.MUTED}


def tuning_document(view: TuningView, charts: dict[str, Any] | None = None) -> doc.Document:
    """Return the best trials, those that run, and what was found.

    Args:
        charts: Data of the page's charts; None for the terminal, which shows fewer trials.
    """
    rows = shown_rows(view, SHOWN_TRIALS if charts is None else MAX_ROWS)
    if charts is not None:
        shown = {row.number for row in rows}
        others = [r for r in view.rows if r.state == TRIAL_FAILED and r.number not in shown]
        rows += others[: max(MAX_ROWS - len(rows), 0)]
    summary: list[doc.Block] = [
        doc.Line(_lead(view), doc.LEAD, doc.PAGE),
        doc.Line(counts_line(view)),
    ]
    trials: list[doc.Block] = [trials_table(view, rows)] if view.rows else []
    if more := len(view.rows) - len(rows):
        text = f"{counted(more, 'further trial')}: paceline tune --csv FILE has all."
        trials.append(doc.Line(text, doc.MUTED, doc.PAGE))
    trials += [doc.Line(line, doc.FAILED) for line in failure_lines(view)]
    found = list(_importances(view))
    if view.gain is not None:
        found.append(doc.Line(gain_sentence(view)))
    lineage = lineage_lines(view)
    if lineage and charts is None:
        found += [doc.Heading(f"How trial {view.best[0]} was trained"), doc.Bullets(lineage)]
    if view.best_command:
        found.append(doc.Line(["best: ", doc.Part(f"paceline run {view.best_command}", doc.CODE)]))
    found += [doc.Line(f"note: {note}", doc.DOUBT) for note in view.notes]
    return doc.Document(
        f"Paceline: study {view.name}",
        f"Study {view.name}",
        [
            doc.Section("summary", "Summary", [*summary, *found]),
            *_charts(view, charts or {}, lineage),
            doc.Section("trials", "Trials", trials, "Trials"),
        ],
        [doc.Part(view.command, doc.CODE), head_line(view)],
    )


def _importances(view: TuningView) -> Iterator[doc.Block]:
    """Yield the shares of the parameters in the terminal, or why there are none."""
    if view.importances:
        of = f"; {view.importance_note}" * bool(view.importance_note)
        head = f"Importance of the parameters (functional ANOVA{of}):"
        yield doc.Line(head, doc.STRONG, doc.TERMINAL)
        yield doc.Bullets(importance_lines(view), doc.TERMINAL)
    elif view.importance_note:
        yield doc.Line(view.importance_note, doc.MUTED)


def _charts(view: TuningView, charts: dict[str, Any], lineage: list[str]) -> Iterator[doc.Section]:
    """Yield the sections of the charts that the page has."""
    lead = _lead(view)
    if "history" in charts:
        caption = "Value of each complete trial. Line: the best value until then."
        blocks: list[doc.Block] = [doc.Chart("tuningHistory", caption, lead)]
        yield doc.Section("history", "History", blocks, "History", doc.PAGE)
    if "parallel" in charts:
        count = counted(len(charts["parallel"]["lines"]), "trial")
        caption = f"Each line is a trial; the darkest ones are the best. {count} with the best "
        label = "Parallel coordinates of parameters and metrics"
        blocks = [doc.Chart("tuningParallel", f"{caption}values.", label)]
        if "importances" in charts:
            of = f", {view.importance_note}" * bool(view.importance_note)
            caption = (
                "Share of each parameter in the differences between the values of trials: "
                f"functional ANOVA of Optuna{of}."
            )
            label = "Importance of the parameters"
            blocks += [doc.Heading("Importance"), doc.Chart("tuningImportances", caption, label)]
        yield doc.Section("parallel", "Parameters", blocks, "Parameters", doc.PAGE)
    if "curves" in charts:
        count = counted(len(charts["curves"]["lines"]), "trial")
        caption = (
            f"Reported values of {count}, the best ones. Dotted: steps at which trials were paused "
            "or stopped."
        )
        blocks = [doc.Chart("tuningCurves", caption, "Learning curves")]
        yield doc.Section("curves", "Learning curves", blocks, "Learning curves", doc.PAGE)
    if "pareto" in charts:
        first = " (the first two metrics are shown)" * (len(view.metrics) > 2)
        caption = (
            f"Diamonds: no other trial is better in one metric and not worse in the others{first}."
        )
        blocks = [doc.Chart("tuningPareto", caption, lead)]
        yield doc.Section("pareto", "Pareto front", blocks, "Pareto front", doc.PAGE)
    if "lineage" in charts:
        caption = (
            "Each point is a member in a generation, each line leads from the trial whose "
            "checkpoint it continued from. Marked: how the best model was trained."
        )
        blocks = [doc.Chart("tuningLineage", caption, lead), doc.Bullets(lineage)]
        yield doc.Section("lineage", "Lineage", blocks, "Lineage", doc.PAGE)


def _lead(view: TuningView) -> str:
    goals = _goals(view, " and ")
    if len(view.metrics) > 1:
        return f"{goals}: {len(view.best)} trials are on the Pareto front ({view.search})."
    if not view.best:
        return f"{goals}: no trial is complete yet ({view.search})."
    row = view.rows[view.best[0]]
    best = f"{value_text(row.values[0])}, trial {row.number} with {parameters_text(row)}"
    return f"Best {view.metrics[0]}: {best} ({view.search})."


def head_line(view: TuningView) -> str:
    """Return what is searched, and how."""
    return f"{_goals(view, ', ')}; {view.search}"


def _goals(view: TuningView, separator: str) -> str:
    return separator.join(map(" ".join, zip(view.goals, view.metrics, strict=True)))


def counts_line(view: TuningView) -> str:
    """Return the numbers of trials by state, and the time left."""
    begun = [row for row in view.rows if row.started is not None]
    parts = [f"{len(begun)} of {counted(view.planned, 'trial')}"]
    states = (COMPLETE, RUNNING, PAUSED, STOPPED, TRIAL_FAILED)
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
    failed = [row for row in view.rows if row.state == TRIAL_FAILED]
    return [*done[: max(most - len(running), 3)], *running[:most]] or failed[:most]


def trials_table(view: TuningView, rows: Sequence[TrialRow]) -> doc.Table:
    """Return a table with one line for each of the rows."""
    has_rungs = any(row.rung for row in view.rows)
    has_steps = any(row.step is not None for row in view.rows)
    has_parents = any(row.generation is not None for row in view.rows)
    headings = ["trial", *view.metrics, *["step"] * has_steps, *["rung"] * has_rungs]
    headings += ["generation", "from"] * has_parents
    headings += ["ranks", "time", *view.parameters]
    found = []
    for row in rows:
        mark = "▸" if row.number in view.best else ""
        values = [value_text(value) for value in row.values]
        if not values:
            values = [value_text(row.last), *["-"] * (len(view.metrics) - 1)]
        cells: list[doc.Text] = [f"{mark}{row.number}", *values]
        cells += ["-" if row.step is None else str(row.step)] * has_steps
        cells += [str(row.rung)] * has_rungs
        if has_parents:
            cells += ["-" if n is None else str(n) for n in (row.generation, row.parent)]
        spent = duration(row.seconds + view.running.get(row.number, 0.0))
        parameters = [parameter_text(row.parameters.get(name)) for name in view.parameters]
        note = row.failure or ("" if row.state == COMPLETE else row.state)
        note += " (known point)" * row.known
        if row.waits_for:
            note += f" waits for {row.waits_for}: {percent(row.waits)}"
        style = _STYLES.get(row.state, "")
        found.append(doc.Row([*cells, str(row.ranks), spent, *parameters, note], style))
    return doc.Table([*map(doc.Column, headings), *doc.columns("")], found)


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
    if len(view.best) != 1 or view.rows[view.best[0]].generation is None:
        return []
    lines = []
    for row in view.ancestry(view.best[0]):
        parameters = parameters_text(row)
        last = "-" if row.step is None else str(row.step)
        value = f"{view.metrics[0]} {value_text(row.last)}"
        lines.append(
            f"  steps {row.first_step + 1} to {last}: trial {row.number}: {parameters}: {value}"
        )
    return lines


def trial_sentence(row: TrialRow, view: TuningView) -> str:
    """Return a trial that ended or paused, in one line."""
    where = f"trial {row.number}"
    parameters = parameters_text(row)
    if row.state == TRIAL_FAILED:
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


def parameters_text(row: TrialRow) -> str:
    """Return the parameters of a trial with their values."""
    return ", ".join(f"{name} = {parameter_text(value)}" for name, value in row.parameters.items())


def parameter_text(value: bool | int | float | str | None) -> str:
    """Return a value of a parameter."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_WAITING = {
    "input": (
        "the next batch",
        "paceline tune --pack SOURCE --stage DATASET packs and stages the input once for all "
        "trials, or a faster loader: paceline diagnose with the command of this trial",
    ),
    "exchange": (
        "other ranks and the exchange between them",
        "fewer ranks for each trial: study.ranks; or paceline diagnose with the command of this "
        "trial",
    ),
    "cores": ("a core", "study.cores = more, or fewer threads: trials share the cores of the node"),
}


def wait_notes(rows: Sequence[TrialRow]) -> list[str]:
    """Return a note for each kind of wait that takes a part of trials' time."""
    notes = []
    for kind, (what, hint) in _WAITING.items():
        found = [row for row in rows if row.waits_for == kind]
        if not found:
            continue
        most = max(found, key=lambda row: row.waits)
        notes.append(
            f"{counted(len(found), 'trial')} waited for {what}, trial {most.number} longest: "
            f"{percent(most.waits)} of its ranks' time. HINT: {hint}"
        )
    return notes


def batch_notes(rows: Sequence[TrialRow]) -> list[str]:
    """Return a note with the bounds of the batch that the gradient noise scale gives."""
    found = [row for row in rows if row.noise]
    if not found:
        return []
    best = min(found, key=lambda row: row.noise[2] / max(row.noise[1], 1e-9))
    samples, low, high = best.noise
    return [
        f"the gradient noise scale of trial {best.number} is {samples:,.0f} samples ({low:,.0f} to "
        f"{high:,.0f}). A global batch far below it needs more steps in proportion, one far above "
        "it gains little. HINT: choose the range of the batch around it"
    ]
