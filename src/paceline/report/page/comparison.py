"""Pages that compare several runs: before and after, and scaling with the number of ranks."""

import itertools
from typing import Any

from ...analyze.figures.compare_runs import (
    FigureChange,
    ScalingRow,
    compare,
    compare_states,
    scaling,
)
from ...analyze.figures.losses import Loss
from ...analyze.figures.report import Report, RunAnalysis
from ...analyze.records.state_timeline import STATES
from ..numbers import amount, counted, signed_duration
from ..sentences import sentence
from ..state_names import STATE_NAMES
from ..terminal.comparison import (
    FACTORS,
    NAMES,
    describe_chance,
    explanation,
    noise_of,
    state_verdict,
    verdict,
)
from ..terminal.run_report import GOOD_EFFICIENCY
from .series import times
from .wording import joined
from .write_page import page

_SHOWN = 8  # most changed losses that are shown
_TOLD = 0.02  # share of a step by which the time of a shown loss has changed at least
_DEFINED = {  # names of definitions that differ from the name of the figure
    "samples_per_s": "samples/s",
    "useful": "useful share",
    "transfer": "transfer efficiency",
    "speedup": "speed-up",
    **{
        name: f"no {name}"
        for name in ("checkpoint", "validation", "input", "starved", "other", "bubble")
    },
    **{
        name: name.replace("_", " ")
        for name in ("scaling_efficiency", "computation_scalability", "global_efficiency")
    },
}


def before_and_after(before: RunAnalysis, after: RunAnalysis) -> str:
    """Return the page of two runs with the same number of ranks, as HTML."""
    both = [before, after]
    reports = [one.report for one in both]
    groups = ([reports[0]], [reports[1]])
    changes, changed_states = compare(*groups), compare_states(*groups)
    parts = [("summary", "Summary"), ("figures", "Figures"), ("steps", "Step times")]
    context = {
        "title": "Paceline: before and after",
        "heading": "Before and after",
        "parts": [*parts, ("places", "Nodes")],
        "reports": reports,
        "labels": ["before", "after"],
        "lead": _lead(changes),
        "chance": describe_chance(*groups, changes),
        "changed_states": changed_states,
        "explained": explanation(changed_states) if changed_states is not None else "",
        "state_names": STATE_NAMES,
        "state_verdict": state_verdict,
        "signed": signed_duration,
        "noise_of": noise_of,
        "losses": _changed(*reports),
        "differences": _differences(*reports),
        "rows": [
            (NAMES[one.figure].strip(), definition_key(one.figure), one, *verdict(one))
            for one in changes
        ],
        "states": [(name, STATE_NAMES[name]) for name in STATES],
        "steps_label": "Step times of both runs",
    }
    return page("compare.html", _data(both, ["before", "after"]), context)


def scales(runs: list[RunAnalysis]) -> str:
    """Return the page of one script's runs on different numbers of ranks, as HTML."""
    runs = sorted(runs, key=lambda one: one.report.size)
    reports = [one.report for one in runs]
    found = scaling(reports)
    labels = [counted(report.size, "rank") for report in reports]
    rows = [
        (NAMES[name].strip(), name, definition_key(name), [getattr(scale, name) for scale in found])
        for name in (*FACTORS, "samples_per_s", "speedup", "scaling_efficiency")
    ]
    data = {**_data(runs, labels), **_curves(found)}
    parts = [("summary", "Summary"), ("curves", "Curves"), ("figures", "Figures")]
    context = {
        "title": "Paceline: scaling",
        "heading": f"Scaling from {labels[0]} to {labels[-1]}",
        "parts": [*parts, ("steps", "Step times"), ("places", "Nodes")],
        "reports": reports,
        "labels": labels,
        "lead": _scaling_lead(found),
        "told": [_stage(first, then) for first, then in itertools.pairwise(found)],
        "rows": [row for row in rows if any(value is not None for value in row[3])],
        "graded": set(FACTORS) | {"scaling_efficiency"},
        "states": [(name, STATE_NAMES[name]) for name in STATES],
        "steps_label": "Step times of all runs",
        "rated": found[0].samples_per_s is not None,
    }
    return page("scaling.html", data, context)


def definition_key(figure: str) -> str:
    """Return the key of a figure's definition."""
    return _DEFINED.get(figure, figure)


def _data(runs: list[RunAnalysis], labels: list[str]) -> dict[str, Any]:
    """Return the time per step in each state and the step times of each run, in s."""
    shares: dict[str, list[float]] = {state: [] for state in STATES}
    courses = []
    for one, label in zip(runs, labels, strict=True):
        report, m = one.report, one.measured
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


def step_s(report: Report) -> float:
    """Return the mean duration of a step in the measured window in s; 0 if there is no window."""
    if report.window_s is None or not report.ranges:
        return 0.0
    return report.window_s / (report.ranges[-1].last - report.ranges[0].first + 1)


def _lead(changes: list[FigureChange]) -> str:
    """Return the change of the throughput in one sentence."""
    rate = next((one for one in changes if one.figure == "samples_per_s"), None)
    rate = rate or next((one for one in changes if one.figure == "step_ms"), None)
    if rate is None or not rate.before or not rate.after:
        return "One of the runs has too few steps for a comparison."
    times = rate.after / rate.before
    if rate.figure == "step_ms":
        times, told = 1 / times, f"{rate.after:.3g} ms per step instead of {rate.before:.3g} ms"
    else:
        told = f"{amount(rate.after)} samples/s instead of {amount(rate.before)}"
    if rate.real is None:
        sure = " The runs have too few steps to distinguish the change from noise."
    elif not rate.real:
        return f"The change is within the noise: {told}, {100 * (times - 1):+.1f} %."
    else:
        sure = " The change exceeds the noise."
    return f'The run "after" is {times:.2f} times as fast as the run "before": {told}.{sure}'


def _changed(before: Report, after: Report) -> list[dict[str, Any]]:
    """Return the losses whose time per step changed, the largest change first; times in s."""
    found: dict[tuple[Any, ...], list[Loss | None]] = {}
    for at, report in enumerate((before, after)):
        for loss in report.losses:
            found.setdefault(_which(loss), [None, None])[at] = loss
    rows: list[dict[str, Any]] = []
    for both in found.values():
        seconds = [
            loss.share * step_s(report) if loss is not None else 0.0
            for loss, report in zip(both, (before, after), strict=True)
        ]
        told, report = (both[1], after) if both[1] is not None else (both[0], before)
        assert told is not None
        what = sentence(told, report).partition(" Seen at ")[0]
        rows.append({"what": what[0].upper() + what[1:], "before": seconds[0], "after": seconds[1]})
    rows.sort(key=lambda row: -abs(row["after"] - row["before"]))
    least = _TOLD * max(step_s(before), step_s(after))
    return [row for row in rows if abs(row["after"] - row["before"]) > least][:_SHOWN]


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


def _scaling_lead(found: list[ScalingRow]) -> str:
    first, last = found[0], found[-1]
    if last.speedup is None or last.scaling_efficiency is None:
        return (
            f"From {first.ranks} to {last.ranks} ranks. The records have no number of samples, so "
            "Paceline cannot compute the speed-up."
        )
    below = next((s.ranks for s in found if (s.scaling_efficiency or 1) < GOOD_EFFICIENCY), None)
    knee = (
        f" It is below {GOOD_EFFICIENCY} from {below} ranks on."
        if below is not None
        else f" It is at least {GOOD_EFFICIENCY} for all numbers of ranks."
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
            "lines": [one for one in lines if any(v is not None for v in one["values"])],
        },
    }
