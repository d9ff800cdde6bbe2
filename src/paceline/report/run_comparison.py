"""Comparison of runs: before and after, and scaling with the number of ranks.

Documents for terminal and page, and the charts of the page.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ..analyze.figures.compare_runs import (
    BETWEEN_RUNS,
    FigureChange,
    Gate,
    Reports,
    ScalingRow,
    StateChange,
    StateChanges,
    chance_limit,
    compare,
    compare_states,
    scaling,
)
from ..analyze.figures.losses import Loss
from ..analyze.figures.report import Report, RunAnalysis
from ..analyze.records.state_timeline import STATES
from . import document as doc
from .figure_names import EFFICIENCIES, NAMES, NOISE, STATE_NAMES, named_figure, state_legend
from .numbers import amount, counted, duration, figure, joined, signed_duration
from .page.run_page import times
from .sentences import sentence
from .verdict import capitalized

# Figures of a scaling table, from the global efficiency to its factors.
FACTORS = ("global_efficiency", *EFFICIENCIES[:-1], "computation_scalability")
_SHOWN = 8  # most changed losses that are shown
_TOLD = 0.02  # share of a step by which the time of a shown loss has changed at least
_GATE_STYLES = {"slower": doc.WORSE, "uncertain": doc.DOUBT, "passed": doc.BETTER}


def comparison_document(before: Reports, after: Reports, gate: Gate | None = None) -> doc.Document:
    """Return tables of runs before and after that mark the changes within the noise."""
    changes, states = compare(before, after), compare_states(before, after)
    lead = _lead(changes)
    figures: list[doc.Block] = [_figures(changes)]
    if chance := describe_chance(before, after, changes):
        figures += [doc.BLANK, doc.Line(chance)]
    doubts = [f"{r.name}: {doubt}." for r in (*before, *after) for doubt in r.doubts]
    end: list[doc.Block] = [doc.Line(doubt, doc.DOUBT) for doubt in doubts]
    if gate is not None:
        end.insert(0, doc.Line(describe_gate(gate), _GATE_STYLES[gate.verdict]))
    both = [("before", report) for report in before] + [("after", report) for report in after]
    return doc.Document(
        "Paceline: before and after",
        "Before and after",
        [
            doc.Section("summary", "Summary", _summary(lead, before[0], after[0]), where=doc.PAGE),
            doc.Section("figures", "Figures", figures, doc.on_page("All figures")),
            doc.Section(
                "states", "States", _states(states, lead), doc.on_page("Time per step, by state")
            ),
            doc.Section("reliability", "Reliability", end, doc.on_page("Reliability")),
            *_of_runs(both, "Step times of both runs"),
        ],
        [_about(label, report) for label, report in both],
    )


def _about(label: str, report: Report) -> doc.Text:
    command = doc.on_page(_command(report), doc.CODE)
    return [
        f"{label + ':':8}",
        doc.in_terminal(report.name),
        command,
        doc.on_page(f" ({report.name})"),
    ]


def _of_runs(runs: Sequence[tuple[str, Report]], label: str) -> list[doc.Section]:
    """Return the sections of a page about the steps and the nodes of all runs."""
    caption = (
        "Where a run has more steps than can be shown, each point is the median of neighbouring "
        "steps."
    )
    nodes: list[doc.Block] = []
    for number, (name, report) in enumerate(runs):
        nodes += [doc.Heading(name), doc.Nodes(report, f"reports.{number}.")]
    steps: doc.Text = [doc.Part("Step time", term="step time"), " over the runs"]
    return [
        doc.Section("steps", "Step times", [doc.Chart("courses", caption, label)], steps, doc.PAGE),
        doc.nodes_section(nodes),
    ]


def _figures(changes: Sequence[FigureChange]) -> doc.Table:
    rows = []
    for number, change in enumerate(changes):
        judgement, style = verdict(change)
        ratio = change.after / change.before if change.before else 1.0
        cells: list[doc.Text] = [
            named_figure(change.figure),
            doc.Part(figure(change.before), figure=f"rows.{number}.before"),
            doc.Part(figure(change.after), figure=f"rows.{number}.after"),
            f"{100 * (ratio - 1):+.1f} %",
            doc.Part(judgement, style),
        ]
        rows.append(doc.Row(cells))
    return doc.Table(doc.columns("", "before", "after", "change", ""), rows)


def describe_chance(before: Reports, after: Reports, changes: list[FigureChange]) -> str:
    """Say which difference of the step times may be chance, and how that is known."""
    limit = chance_limit(changes)
    if limit is None:
        return ""
    chance = f"differences of the step time below {100 * limit:.1f} % can be chance"
    if len(before) + len(after) < 4:
        few = (
            "One run of each"
            if len(before) + len(after) == 2
            else f"{counted(len(before), 'run')} before and {counted(len(after), 'run')} after"
        )
        return (
            f"{few}: {chance}, if equal runs differ by {100 * BETWEEN_RUNS:.1f} % (standard "
            "deviation). HINT: --baseline DIR adds further runs, from which this is measured"
        )
    runs = f"{counted(len(before), 'run')} before and {counted(len(after), 'run')} after"
    return f"{runs}: {chance}, as measured between these runs."


def describe_gate(gate: Gate) -> str:
    """Say whether the runs are slower than the baseline by more than the tolerance."""
    slower = f"{100 * abs(gate.slower):.1f} % {'longer' if gate.slower >= 0 else 'shorter'}"
    what = (
        f"Gate of {100 * gate.tolerance:g} %: a step takes {slower}, of which "
        f"{100 * gate.noise:.1f} % can be chance"
    )
    if gate.verdict == "uncertain":
        return f"{what}: passed, but not sure. HINT: --baseline DIR adds further runs"
    return f"{what}: {'failed' if gate.verdict == 'slower' else 'passed'}."


def _states(found: StateChanges | None, lead: str) -> list[doc.Block]:
    """Return the table of the states' times, and the sentence that explains the change."""
    blocks = _state_chart(lead)
    if found is None:
        return blocks
    rows = []
    for number, row in enumerate([*found.rows, found.whole]):
        is_whole = row is found.whole
        at = "states.whole" if is_whole else f"states.rows.{number}"
        name = f"whole {found.unit}" if is_whole else STATE_NAMES[row.state]
        judgement, style = state_verdict(row)
        cells: list[doc.Text] = [
            doc.Part(name, term="" if is_whole else row.state),
            doc.Part(duration(row.before_s), figure=f"{at}.before_s"),
            doc.Part(duration(row.after_s), figure=f"{at}.after_s"),
            signed_duration(row.longer_s),
            "" if row.limit_s is None else f"± {duration(row.limit_s)}",
            doc.Part(judgement, style),
        ]
        rows.append(doc.Row(cells))
    headings = (f"time per {found.unit}|state", "before", "after", "change", "noise|noise", "")
    table = doc.Table(doc.columns(*headings), rows)
    return [*blocks, table, doc.BLANK, doc.Line(explanation(found), doc.STRONG)]


def _state_chart(lead: str) -> list[doc.Block]:
    caption = "Mean of all ranks. The parts of a bar add up to the step time."
    return [state_legend(STATE_NAMES), doc.Chart("runs", caption, lead)]


def state_verdict(row: StateChange) -> tuple[str, str]:
    """Return whether a state's time has changed, as ``verdict`` does."""
    if not row.real:
        return NOISE[row.real], doc.MUTED
    return ("longer", doc.WORSE) if row.longer_s > 0 else ("shorter", doc.BETTER)


def explanation(found: StateChanges) -> str:
    """Say by how much a step takes longer, and which states explain it."""
    whole = found.whole
    if whole.real is False or not whole.longer_s:
        return f"A {found.unit} takes as long as before, within the noise."
    how = "longer" if whole.longer_s > 0 else "less"
    sure = (
        "; the runs have too few steps to distinguish that from noise" if whole.real is None else ""
    )
    took = f"A {found.unit} takes {duration(abs(whole.longer_s))} {how}{sure}"
    if not found.explained_by:
        return f"{took}. No state alone explains it."
    rows = {row.state: row for row in found.rows}
    parts = [
        f"{STATE_NAMES[name]} {signed_duration(rows[name].longer_s)} "
        f"({100 * rows[name].longer_s / whole.longer_s:.0f} %)"
        for name in found.explained_by
    ]
    return f"{took}. It is explained by {', '.join(parts)}."


def verdict(change: FigureChange) -> tuple[str, str]:
    """Return whether a change exceeds the noise, in words, and its style."""
    if not change.real:
        return NOISE[change.real], doc.MUTED
    better = (change.after > change.before) != (change.figure == "step_ms")
    return ("better", doc.BETTER) if better else ("worse", doc.WORSE)


def _summary(lead: str, before: Report, after: Report) -> list[doc.Block]:
    """Return the change of the throughput, the changed losses, and other differences."""
    blocks: list[doc.Block] = [doc.Line(lead, doc.LEAD)]
    rows = []
    for what, old, new in _changed(before, after):
        style = doc.BETTER if new < old else doc.WORSE
        first, second = (duration(value) if value else "0" for value in (old, new))
        rows.append(doc.Row([what, first, doc.Part(second, style)]))
    if rows:
        columns = doc.columns("loss, mean time per step|loss", "before", "after")
        blocks += [doc.Heading("Changed losses"), doc.Table(columns, rows)]
    if differences := _differences(before, after):
        blocks += [doc.Heading("Other differences"), doc.Bullets(differences)]
    return blocks


def step_s(report: Report) -> float:
    """Return the mean duration of a step in the measured window in s; 0 if there is no window."""
    if report.window_s is None or not report.ranges:
        return 0.0
    return report.window_s / (report.ranges[-1].last - report.ranges[0].first + 1)


def _lead(changes: list[FigureChange]) -> str:
    """Return the change of the throughput in one sentence."""
    rate = next((change for change in changes if change.figure == "samples_per_s"), None)
    rate = rate or next((change for change in changes if change.figure == "step_ms"), None)
    if rate is None or not rate.before or not rate.after:
        return "One of the runs has too few steps for a comparison."
    times = rate.after / rate.before
    if rate.figure == "step_ms":
        times, rates = 1 / times, f"{rate.after:.3g} ms per step instead of {rate.before:.3g} ms"
    else:
        rates = f"{amount(rate.after)} samples/s instead of {amount(rate.before)}"
    if rate.real is None:
        sure = " The runs have too few steps to distinguish the change from noise."
    elif not rate.real:
        return f"The change is within the noise: {rates}, {100 * (times - 1):+.1f} %."
    else:
        sure = " The change exceeds the noise."
    return f'The run "after" is {times:.2f} times as fast as the run "before": {rates}.{sure}'


def _changed(before: Report, after: Report) -> list[tuple[str, float, float]]:
    """Return the losses whose time per step (s) changed, before and after, largest change first."""
    found: dict[tuple[Any, ...], list[Loss | None]] = {}
    for at, report in enumerate((before, after)):
        for loss in report.losses:
            found.setdefault(_which(loss), [None, None])[at] = loss
    rows: list[tuple[str, float, float]] = []
    for both in found.values():
        seconds = [
            loss.share * step_s(report) if loss is not None else 0.0
            for loss, report in zip(both, (before, after), strict=True)
        ]
        loss_shown, report = (both[1], after) if both[1] is not None else (both[0], before)
        assert loss_shown is not None
        what = sentence(loss_shown, report).partition(" Seen at ")[0]
        rows.append((capitalized(what), seconds[0], seconds[1]))
    rows.sort(key=lambda row: -abs(row[2] - row[1]))
    least = _TOLD * max(step_s(before), step_s(after))
    return [row for row in rows if abs(row[2] - row[1]) > least][:_SHOWN]


def _which(loss: Loss) -> tuple[Any, ...]:
    """Return the key that identifies the same loss in two runs."""
    if loss.kind == "wait":
        return loss.kind, loss.rank, loss.doing
    return loss.kind, loss.group, loss.collective


def _differences(before: Report, after: Report) -> list[str]:
    """Return other differences between the runs that may explain changes of the figures."""
    found = []
    if before.command != after.command:
        found.append(f"Command: {_command(before)} before, {_command(after)} after.")
    for name, what in (
        *(("paceline", "Paceline"), ("torch", "PyTorch"), ("python", "Python")),
        *(("threads", "Threads per rank"), ("cores", "Cores"), ("device", "Device")),
    ):
        values = [
            sorted({str(getattr(place, name)) for place in report.places} - {"None"})
            for report in (before, after)
        ]
        if values[0] != values[1] and all(values):
            found.append(f"{what}: {joined(values[0])} before, {joined(values[1])} after.")
    hosts = [sorted(set(report.hosts)) for report in (before, after)]
    if hosts[0] != hosts[1]:
        named = [joined(names[:4]) + (" ..." if len(names) > 4 else "") for names in hosts]
        found.append(f"Nodes: {named[0]} before, {named[1]} after.")
    return found


def _command(report: Report) -> str:
    return " ".join(report.command) or report.name


def comparison_charts(runs: Sequence[RunAnalysis], labels: Sequence[str]) -> dict[str, Any]:
    """Return the time per step in each state and the step times of each run, in s."""
    shares: dict[str, list[float]] = {state: [] for state in STATES}
    courses = []
    for run, label in zip(runs, labels, strict=True):
        report, m = run.report, run.measured
        for state in STATES:
            mean = sum(rank[state] for rank in report.states) / max(len(report.states), 1)
            shares[state].append(mean * step_s(report))
        if m is not None and (steps := m.steps) is not None:
            courses.append({"name": label, **times(steps)})
    return {
        "states": list(STATES),
        "stateNames": STATE_NAMES,
        "runs": {"names": labels, "seconds": shares},
        "courses": courses,
    }


def scaling_document(reports: Sequence[Report]) -> doc.Document:
    """Return the efficiencies by number of ranks; the first run is the reference."""
    reports = sorted(reports, key=lambda report: report.size)
    found = scaling(reports)
    labels = [counted(report.size, "rank") for report in reports]
    lead = _scaling_lead(found)
    stages = [_stage(first, then) for first, then in itertools.pairwise(found)]
    doubts = [
        doc.Line(f"{report.name}: {doubt}.", doc.DOUBT)
        for report in reports
        for doubt in report.doubts
    ]
    summary: list[doc.Block] = [doc.Line(lead, doc.LEAD), doc.Bullets(stages), *_state_chart(lead)]
    speedup = "Speed-up relative to the run with the fewest ranks. Dashed: the ideal speed-up."
    efficiency = "Efficiencies. An efficiency of 0.8 or above is good."
    charts = [doc.Chart("efficiency", efficiency, lead)]
    if found[0].samples_per_s is not None:
        charts.insert(0, doc.Chart("speedup", speedup, lead))
    return doc.Document(
        "Paceline: scaling",
        f"Scaling from {labels[0]} to {labels[-1]}",
        [
            doc.Section("summary", "Summary", summary, where=doc.PAGE),
            doc.Section(
                "curves", "Curves", [doc.Charts(charts)], "Speed-up and efficiency", doc.PAGE
            ),
            doc.Section("figures", "Figures", [_scaling_table(found)], doc.on_page("All figures")),
            doc.Section("doubts", "Doubts", doubts, doc.on_page("Doubts")),
            *_of_runs(list(zip(labels, reports, strict=True)), "Step times of all runs"),
        ],
        [
            [doc.on_page(f"{label}: "), doc.on_page(_command(report), doc.CODE)]
            for label, report in zip(labels, reports, strict=True)
        ],
    )


def _scaling_table(found: Sequence[ScalingRow]) -> doc.Table:
    rows = []
    for name in (*FACTORS, "samples_per_s", "speedup", "scaling_efficiency"):
        values = [getattr(scale, name) for scale in found]
        if not any(value is not None for value in values):
            continue
        cells = []
        for number, value in enumerate(values):
            path = f"rows.{number}.{name}"
            if name in FACTORS:
                cells.append(doc.graded(value, path, 3))
            else:
                cells.append(
                    doc.Part(doc.NOT_KNOWN if value is None else figure(value), figure=path)
                )
        rows.append(doc.Row([named_figure(name), *cells]))
    sizes = (str(scale.ranks) for scale in found)
    return doc.Table(doc.columns("ranks|rank", *sizes), rows)


def scaling_charts(runs: Sequence[RunAnalysis]) -> dict[str, Any]:
    """Return the data of the charts of runs on different numbers of ranks."""
    runs = sorted(runs, key=lambda run: run.report.size)
    labels = [counted(run.report.size, "rank") for run in runs]
    return {**comparison_charts(runs, labels), **_curves(scaling([run.report for run in runs]))}


def _scaling_lead(found: list[ScalingRow]) -> str:
    first, last = found[0], found[-1]
    if last.speedup is None or last.scaling_efficiency is None:
        return (
            f"From {first.ranks} to {last.ranks} ranks. The records have no number of samples, so "
            "Paceline cannot compute the speed-up."
        )
    below = next(
        (s.ranks for s in found if (s.scaling_efficiency or 1) < doc.GOOD_EFFICIENCY), None
    )
    knee = (
        f" It is below {doc.GOOD_EFFICIENCY} from {below} ranks on."
        if below is not None
        else f" It is at least {doc.GOOD_EFFICIENCY} for all numbers of ranks."
    )
    return (
        f"{last.ranks} ranks are {last.speedup:.2f} times as fast as {first.ranks}. The scaling "
        f"efficiency is {last.scaling_efficiency:.2f}.{knee}"
    )


def _stage(first: ScalingRow, then: ScalingRow) -> str:
    """Return the change to the next number of ranks, and the factor that falls most."""
    what = f"From {first.ranks} to {then.ranks} ranks"
    if first.samples_per_s and then.samples_per_s:
        what += f": {then.samples_per_s / first.samples_per_s:.2f} times as fast"
    names = ("load_balance", "serialisation", "transfer", "checkpoint", "validation", "input")
    falls = {}
    for name in (*names, "starved", "other", "bubble", "computation_scalability"):
        old, new = getattr(first, name), getattr(then, name)
        if old and new is not None:
            falls[name] = new / old
    worst = min(falls, key=falls.__getitem__)
    if falls[worst] > 0.99:
        return f"{what}. No factor decreases by more than 1 %."
    old, new = getattr(first, worst), getattr(then, worst)
    name = NAMES[worst].strip()
    return f"{what}. The factor that decreases most is {name}: {old:.2f} to {new:.2f}."


def _curves(found: list[ScalingRow]) -> dict[str, Any]:
    ranks = [scale.ranks for scale in found]
    named = {
        "scaling efficiency": "scaling_efficiency",
        "parallel efficiency": "parallel",
        "computation scalability": "computation_scalability",
        "useful": "useful",
    }
    lines = [
        {"name": name, "values": [getattr(scale, field) for scale in found]}
        for name, field in named.items()
    ]
    speedup = [
        {"name": "measured", "values": [scale.speedup for scale in found]},
        {"name": "ideal", "values": [n / ranks[0] for n in ranks], "ideal": True},
    ]
    return {
        "speedup": {"ranks": ranks, "lines": speedup, "log": True},
        "efficiency": {
            "ranks": ranks,
            "lines": [line for line in lines if any(v is not None for v in line["values"])],
        },
    }
