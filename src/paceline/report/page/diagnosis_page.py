"""Page of a diagnosis: the share of the ideal that is reached, the causes of the rest, and their
evidence.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...analyze.diagnosis.causes import MIN_SHARE, USUAL_SHARE, Cause, Witness, uncertain_bars
from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.line_profile import Doing, LineProfile, SampledLine
from ...analyze.diagnosis.operator_profile import OperatorProfile
from ...analyze.diagnosis.rules.operators import findings
from ...analyze.diagnosis.rungs import Interval, Waterfall
from ...analyze.records.state_timeline import STATES
from .. import remedies as cures
from ..numbers import amount, counted, joined, percent
from ..state_names import STATE_NAMES
from ..survey import describe_survey
from ..terminal.diagnose import NAMES, computing, rate_unit, waits_for_cores
from ..terminal.diagnosis.lines import (
    MIN_LINE_SHARE,
    describe_doing,
    describe_ranks,
    describe_worker,
    lines_as_json,
)
from ..terminal.diagnosis.operators import nothing_wrong
from ..verdict.of_diagnosis import verdict_of_diagnosis, without_values
from .definitions import DEFINITIONS
from .wording import largest_losses
from .write_page import page

MAX_SHOWN = 40  # most shown entries of a list in the evidence
ROOM = 1.3  # maximum length of the axis for wide intervals, relative to the longest bar
VERDICTS = {
    "confirmed": "Confirmed by experiment",
    "not-confirmed": "Not confirmed by experiment",
    "not-testable": "Not testable from outside",
}
BASES = {
    "experiment": "measured by experiment",
    "record": "measured in the record",
    "estimate": "estimated",
}
_COLOURS = {  # of each bar: the colour of the state that it belongs to
    "sharing": "other",
    "uneven": "wait",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "exchange": "transfer",
    "input": "input",
}


def diagnosis(found: Diagnosis, words: Mapping[str, str]) -> str:
    """Return the page as HTML; ``words`` has a description of each rung."""
    w, size, profiles = found.waterfall, found.report.size, _profiles(found)
    unit = rate_unit(found.report)
    options = without_values(found.options) or ["-n", str(size)]
    command = shlex.join(found.command)
    there = {
        "summary": "Summary",
        "waterfall": "Waterfall" if w is not None else "",
        "remedies": "Remedies" if found.tried or found.remedies else "",
        "lines": "Time by line" if profiles["legend"] else "",
        "model": "Inside the model" if profiles["operators"] else "",
        "survey": "Survey" if found.ladder.survey is not None else "",
        "witnesses": "Experiment and record" if found.witnesses else "",
        "rungs": "Measurements",
        "how": "Method",
        "places": "Nodes",
    }
    known = [*found.causes, *found.usual]
    context = {
        "title": f"Paceline: diagnosis of {found.command[0]}",
        "heading": f"Causes of lost time on {counted(size, 'rank')}",
        "parts": [(key, name) for key, name in there.items() if name],
        "command": command,
        "record_command": f"paceline run {shlex.join(options)} --record record {command}",
        "lead": _lead(found, unit),
        "report": found.report,
        "ladder": found.ladder,
        "w": w,
        "unit": unit,
        "names": NAMES,
        "defined": lambda name: f"held by {name}" in DEFINITIONS,
        "unsure": [NAMES[name] for name in uncertain_bars(w, known)] if w else [],
        "causes": [(cause, list(facts(cause, at))) for at, cause in enumerate(found.causes)],
        "usual": found.usual,
        "usual_share": USUAL_SHARE,
        "unconfirmed": found.unconfirmed,
        "verdicts": VERDICTS,
        "bases": BASES,
        "witnesses": found.witnesses,
        "words": words,
        "rounds": max((len(runs) for runs in found.ladder.rungs.values()), default=0),
        "notes": [*computing(found), *waits_for_cores(found), *found.notes],
        "finite": math.isfinite,
        "agreement": agreement,
        "conclusion": verdict_of_diagnosis(found),
        "chart_caption": _caption(w) if w else "",
        "chart_label": _label(w, unit) if w else "",
        "states": [(name, STATE_NAMES[name]) for name in STATES],
        "largest": largest_losses(found.report) if w is None else [],
        **profiles,
        **_remedies(found, unit),
    }
    charts = {"waterfall": chart(w, unit)} if w else {}
    if (after := _after(found)) is not None:
        charts["after"] = chart(after, unit)
    return page("diagnosis.html", charts, context)


def _profiles(found: Diagnosis) -> dict[str, Any]:
    """Return the template variables for time by line, operators and the survey."""
    lines, worker_lines = line_rows(found.lines)
    seen = found.ladder.survey
    return {
        "lines": lines,
        "worker_lines": worker_lines,
        "legend": legend([*lines, *worker_lines]),
        "survey": describe_survey(seen, found.minutes) if seen is not None else [],
        **operator_context(found.operators),
    }


def _after(found: Diagnosis) -> Waterfall | None:
    return found.after.waterfall if found.after is not None and found.waterfall else None


def _remedies(found: Diagnosis, unit: str) -> dict[str, Any]:
    """Return the template variables for remedies: proposed, measured, and remaining.

    Paths are positions in the JSON of the diagnosis.
    """
    after = _after(found)
    proposed = found.remedies if found.after is None else found.after.remedies
    decided = found.tried.decided if found.tried and found.after is None else set()
    left = [(at, one) for at, one in enumerate(proposed) if one.knob not in decided]
    left_path = "after.remedies" if found.after is not None else "remedies"
    tried, proposed_now = found.tried, list(enumerate(found.remedies))
    confirmed = tried.confirmed if tried else None
    return {
        "tried": tried,
        "tried_table": cures.tried_table(tried) if tried else None,
        "nothing_tried": cures.NOTHING_TRIED,
        "losses": cures.loss_changes(tried) if tried else [],
        "confirmed": cures.describe_confirmed(confirmed) if confirmed else "",
        "after": found.after if after is not None else None,
        "after_caption": _caption(after) if after else "",
        "after_label": _label(after, unit) if after else "",
        "proposed": cures.proposed_table(proposed_now, "remedies") if found.remedies else None,
        "left": cures.proposed_table(left, left_path) if left else None,
        "prediction_errors": cures.prediction_errors(found.remedies, found.off),
    }


def agreement(one: Witness) -> str:
    """Return in words whether experiment and record agree; empty if only one of them exists."""
    if one.ladder is None or one.record is None:
        return ""
    if one.differ:
        return "they differ"
    wide = one.ladder.low <= 0 and max(one.ladder.mean, one.record) >= MIN_SHARE
    return "interval too wide" if wide else "they agree"


def _lead(found: Diagnosis, unit: str) -> str:
    """Return the share of the ideal that is reached, and the largest cause, in words."""
    w, size = found.waterfall, found.report.size
    if w is None:
        return "Paceline cannot determine the causes, because some of the measurements are missing."
    reach = "reaches" if size == 1 else "reach"
    reached = (
        f"{counted(size, 'rank')} {reach} {percent(w.reached)} of the ideal: "
        f"{amount(w.measured.mean)} of {amount(w.ideal.mean)} {unit}."
    )
    if found.causes:
        first = found.causes[0]
        share = percent(first.share)
        return f"{reached} The largest cause, {share} of a step's time: {first.sentence}."
    if doubtful := uncertain_bars(w, found.usual):
        return (
            f"{reached} No cause is certain: {joined(NAMES[name] for name in doubtful)} may cost "
            "time, but the rounds are too few or differ too much. HINT: use a larger --minutes, "
            "or a machine without other load"
        )
    least = f"{100 * MIN_SHARE:.0f} %"
    if found.usual:
        first = found.usual[0]
        said = f"The largest usual cost, {percent(first.share)} of a step's time: {first.sentence}"
        return f"{reached} No other cause takes {least} of a step's time. {said}."
    return f"{reached} No cause takes {least} of a step's time."


@dataclass(frozen=True)
class Fact:
    """One row of a cause's evidence.

    Attributes:
        name: Label of the row.
        figures: Values as (position in the JSON, text).
        lines: Lines of the script as (position in the JSON, file and line, code, share).
        more: Number of entries that are not shown.
    """

    name: str
    figures: list[tuple[str, str]]
    lines: list[tuple[str, str, str, str]]
    more: int = 0


def facts(cause: Cause, number: int) -> Iterator[Fact]:
    """Yield the evidence of a cause as table rows; ``number`` is its index among the causes."""
    yield from _facts(cause.evidence, f"causes.{number}.evidence", ())


def _facts(values: Mapping[str, Any], path: str, above: tuple[str, ...]) -> Iterator[Fact]:
    for key, value in values.items():
        name, place = ", ".join((*above, _name(key))), f"{path}.{key}"
        if isinstance(value, Mapping):
            yield from _facts(value, place, (*above, _name(key)))
        elif isinstance(value, list | tuple):
            yield from _listed(value, name, place, above)
        else:
            yield Fact(name, [(place, _text(value))], [])


def _listed(value: Any, name: str, place: str, above: tuple[str, ...]) -> Iterator[Fact]:
    shown, more = list(enumerate(value))[:MAX_SHOWN], max(len(value) - MAX_SHOWN, 0)
    if not shown:
        return
    if all(isinstance(one, Mapping) and "code" in one for one in value):
        yield Fact(name, [], [_line(one, f"{place}.{at}") for at, one in shown], more)
    elif any(isinstance(one, Mapping | list | tuple) for one in value):
        for at, one in shown:
            yield from _facts({str(at): one}, place, (*above, name))
    else:
        yield Fact(name, [(f"{place}.{at}", _text(one)) for at, one in shown], [], more)


def _line(line: Mapping[str, Any], place: str) -> tuple[str, str, str, str]:
    """Return the entry of ``Fact.lines`` for a line that the sampling profiler found."""
    where = f"{line.get('file', 'line')}:{line.get('line', '?')}"
    if line.get("function"):
        where += f" in {line['function']}"
    share = line.get("share")
    return f"{place}.share", where, str(line["code"]), percent(share) if share is not None else ""


def _name(key: str) -> str:
    """Return the label of a key: "busbw (GB/s)" for "busbw_GB_s"."""
    key = re.sub(r"_GB_s$", " (GB/s)", key)
    return re.sub(r"_s$", " (s)", key).replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return amount(value) if isinstance(value, float) else str(value)


def chart(w: Waterfall, unit: str) -> dict[str, Any]:
    """Return the data of the waterfall chart, with one entry per bar from top to bottom.

    Lists: ``bases`` (start of each bar), ``lengths`` (negative for a loss), ``errors`` (half of the
    interval), ``colours``, and ``sure`` (whether the interval excludes zero). Values are in
    ``unit``.
    """
    bars = [_bar("ideal", w.ideal, 0.0, 1.0, unit) | {"colours": "soft"}]
    level = w.ideal.mean
    for bar in w.bars:
        one = _bar(NAMES[bar.id], bar.loss, level, bar.share.mean, unit, bar.of_step.mean)
        one |= {"colours": _COLOURS.get(bar.id, "other"), "lengths": -bar.loss.mean}
        bars.append(one | {"sure": not bar.loss.low <= 0 <= bar.loss.high})
        level -= bar.loss.mean
    bars.append(_bar("measured", w.measured, 0.0, w.reached, unit))
    highest = max(one["bases"] + max(one["lengths"], 0) for one in bars)
    intervals = [one["bases"] + one["lengths"] + one["errors"] for one in bars]
    top = 1.02 * min(max(highest, *intervals), ROOM * highest)
    return {"unit": unit, "top": top} | {key: [one[key] for one in bars] for key in bars[0]}


def _bar(
    name: str, found: Interval, base: float, share: float, unit: str, of_step: float | None = None
) -> dict[str, Any]:
    parts = [f"{amount(found.mean)} {unit}{_between(found)}", f"{percent(share)} of the ideal"]
    if of_step is not None:
        parts[0] = f"lost {parts[0]}" if found.mean >= 0 else f"gained {_gain(found, unit)}"
        parts[1] = f"{percent(abs(share))} of the ideal"
        parts.append(f"{percent(abs(of_step))} of a step's time")
    return {
        "names": name,
        "bases": base,
        "lengths": found.mean,
        "errors": (found.high - found.low) / 2 if math.isfinite(found.low) else 0.0,
        "colours": "useful",
        "sure": True,
        "shares": share,
        "text": "<br>".join(parts),
    }


def _gain(loss: Interval, unit: str) -> str:
    return f"{amount(-loss.mean)} {unit}{_between(Interval(-loss.mean, -loss.high, -loss.low))}"


def _between(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return ""
    return f" ({amount(interval.low)} to {amount(interval.high)})"


def _caption(w: Waterfall) -> str:
    text = (
        "Percentages are shares of the ideal throughput, not of a step's time. Lines are 90 % "
        f"intervals over {counted(w.repetitions, 'round')}."
    )
    if any(bar.loss.low <= 0 <= bar.loss.high for bar in w.bars):
        text += " Hatched bars are within the spread of the rounds, so they may be zero."
    return text


def _label(w: Waterfall, unit: str) -> str:
    """Return the description of the chart for screen readers."""
    bars = joined(f"{NAMES[bar.id]} {percent(bar.share.mean)}" for bar in w.bars)
    return (
        f"From the ideal, {amount(w.ideal.mean)} {unit}, to the measured "
        f"{amount(w.measured.mean)} {unit}. Lost of the ideal: {bars}."
    )


MAX_LINES = 20
LEAST_OPERATORS, MAX_OPERATORS = 5, 20  # those between have MIN_LINE_SHARE of a step
_ACTIVITY_COLOURS = {  # CSS variables
    Doing.TORCH: "useful",
    Doing.LIBRARY: "checkpoint",
    Doing.PYTHON: "validation",
    Doing.SHORT_CALLS: "map2",
    Doing.FILE: "input",
    Doing.WAIT: "wait",
    Doing.COLLECTIVE: "transfer",
    Doing.CORE: "starved",
    Doing.GARBAGE: "garbage",
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        path: Position in the JSON of the diagnosis.
        parts: Of the bar: (activity, CSS variable of its colour, width in percent).
        inclusive: Share of a step with calls; None for lines of loader workers.
    """

    path: str
    place: str
    code: str
    share: float
    inclusive: float | None
    doing: str
    parts: list[tuple[str, str, float]]


def line_rows(profile: LineProfile | None) -> tuple[list[Row], list[Row]]:
    """Return the lines with most time, and those of loader workers."""
    if profile is None:
        return [], []
    known = {_key(one): at for at, one in enumerate(lines_as_json(profile) or [])}
    lines = [one for one in profile.lines()[:MAX_LINES] if one.share >= MIN_LINE_SHARE]
    workers = [one for one in profile.worker_lines()[:MAX_LINES] if one.share >= MIN_LINE_SHARE]

    def row(
        line: SampledLine, doing: Mapping[Doing, float], said: str, longest: float, *, worker: bool
    ) -> Row:
        at = known[line.file, line.line, line.function, worker]
        place = f"{line.file.rpartition('/')[2]}:{line.line} {line.function}"
        largest = sorted(doing.items(), key=lambda one: -one[1])
        parts = [
            (str(name), _ACTIVITY_COLOURS[name], 100 * part / longest) for name, part in largest
        ]
        return Row(f"lines.{at}", place, line.code, sum(doing.values()), None, said, parts)

    longest = max((one.share for one in lines), default=1.0)
    own = []
    for one in lines:
        said = describe_doing(one) + describe_ranks(profile.ranks, one)
        found = row(one.line, one.doing, said, longest, worker=False)
        own.append(replace(found, share=one.share, inclusive=one.inclusive_share))
    longest = max((one.share for one in workers), default=1.0)
    return own, [
        row(one.line, {one.doing: one.share}, describe_worker(one), longest, worker=True)
        for one in workers
    ]


def _key(one: dict[str, Any]) -> tuple[str, int, str, bool]:
    return one["file"], one["line"], one["function"], one["in_workers"]


def legend(rows: list[Row]) -> list[tuple[str, str]]:
    """Return the activities of the bars with their colours."""
    return list(dict.fromkeys((name, colour) for row in rows for name, colour, _ in row.parts))


def operator_context(profile: OperatorProfile | None) -> dict[str, Any]:
    """Return the template variables of the section "Inside the model"."""
    shown = profile if profile is not None and profile.operators else None
    largest = shown.operators[:MAX_OPERATORS] if shown else []
    return {
        "model": shown,
        "operators": [
            one
            for at, one in enumerate(largest)
            if at < LEAST_OPERATORS or one.share >= MIN_LINE_SHARE
        ],
        "findings": findings(shown) if shown else [],
        "nothing_wrong": nothing_wrong(shown) if shown else "",
    }
