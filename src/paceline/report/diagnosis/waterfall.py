"""The throughput of a training from the ideal to the measured one: sentence, table and chart."""

import math
from typing import Any

from ...analyze.diagnosis.causes import uncertain_bars
from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.rungs import Interval, Waterfall
from ...analyze.diagnosis.table import INDICATORS
from ...analyze.figures.report import Report
from .. import document as doc
from ..numbers import amount, counted, joined, percent
from .intervals import rate_around, share_around

MORE_ROUNDS = "HINT: use a larger --minutes, or a machine without other load"
_MAX_INTERVAL_LENGTH = 1.3  # of the axis for wide intervals, relative to the longest bar
_COLOURS = {  # of each bar: the colour of the state that it belongs to
    "sharing": "other",
    "uneven": "wait",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "exchange": "transfer",
    "input": "input",
}


def rate_unit(report: Report) -> str:
    """Return the unit of the waterfall: steps stand in for samples that the script hides."""
    return "samples/s" if report.samples_per_s else "steps/s"


def lead(found: Diagnosis) -> str:
    """Return the share of the ideal that is reached, and the largest cause, in words."""
    w, size = found.waterfall, found.report.size
    if w is None:
        return "Paceline cannot determine the causes, because some of the measurements are missing."
    reach = "reaches" if size == 1 else "reach"
    reached = (
        f"{counted(size, 'rank')} {reach} {percent(w.reached)} of the ideal: "
        f"{amount(w.measured.mean)} of {amount(w.ideal.mean)} {rate_unit(found.report)}."
    )
    if found.causes:
        first = found.causes[0]
        share = percent(first.share)
        return f"{reached} The largest cause, {share} of a step's time: {first.sentence}."
    if doubtful := uncertain_bars(w, found.usual):
        names = joined(INDICATORS[name].title for name in doubtful)
        return (
            f"{reached} No cause is certain: {names} may cost time, but the rounds are too few or "
            f"differ too much. {MORE_ROUNDS}"
        )
    least = f"{100 * MIN_SHARE:.0f} %"
    if found.usual:
        first = found.usual[0]
        usual = f"The largest usual cost, {percent(first.share)} of a step's time: {first.sentence}"
        return f"{reached} No other cause takes {least} of a step's time. {usual}."
    return f"{reached} No cause takes {least} of a step's time."


def waterfall_section(w: Waterfall, report: Report, width: int) -> doc.Section:
    """Return the waterfall as a table with bars in the terminal, and as a chart on a page."""
    unit = rate_unit(report)
    table = _table(w, unit, max(10, min(60, width - 60)))
    note = doc.text(
        "In each column, the first row less the rows with \N{MINUS SIGN} is the last row. A step "
        f"with nothing lost would take {percent(w.reached)} of the measured one. In brackets: the "
        "[90 % interval|interval]."
    )
    heading = doc.text("[Waterfall|waterfall]: from the ideal to the measured throughput", doc.PAGE)
    blocks: list[doc.Block] = [
        *doc.only(doc.TERMINAL, [table]),
        waterfall_chart("waterfall", w, unit),
        doc.Folded("Show as a table", [table]),
        doc.Line(note, doc.MUTED, doc.PAGE),
    ]
    return doc.Section("waterfall", "Waterfall", blocks, heading)


def _table(w: Waterfall, unit: str, wide: int) -> doc.Table:
    """Return ideal, losses and measured rate. wide: columns of the longest bar in the terminal."""
    ratio = "waterfall.measured.mean/waterfall.ideal.mean"
    reached = doc.Part(percent(w.reached), figure=ratio)
    ideal: list[doc.Text] = [
        doc.Part("ideal", term="ideal"),
        rate_around(w.ideal, "waterfall.ideal"),
    ]
    rows = [doc.Row([*ideal, percent(1), percent(1), "█" * wide])]
    level = w.ideal.mean
    for number, bar in enumerate(w.bars):
        at = f"waterfall.bars.{number}"
        high, level = level, level - bar.loss.mean
        ends = sorted((high, level))
        start, end = (round(wide * min(max(end, 0) / w.ideal.mean, 1)) for end in ends)
        drawn = doc.Part(
            " " * start + "░" * (end - start), doc.FAILED if bar.loss.mean > 0 else doc.GOOD
        )
        is_sure = bar.loss.low > 0 or bar.loss.high < 0
        name = [
            doc.in_terminal(f"- {INDICATORS[bar.id].title}", "" if is_sure else doc.MUTED),
            doc.on_page("\N{MINUS SIGN} "),
            *doc.only(doc.PAGE, [indicator_name(bar.id)]),
        ]
        shares = [
            [
                doc.in_terminal(percent(bar.share.mean)),
                *doc.only(doc.PAGE, share_around(bar.share, f"{at}.share")),
            ],
            share_around(bar.of_step, f"{at}.of_step"),
        ]
        rows.append(doc.Row([name, rate_around(bar.loss, f"{at}.loss"), *shares, drawn]))
    measured: list[doc.Text] = [
        doc.Part("measured", term="measured rate"),
        rate_around(w.measured, "waterfall.measured"),
    ]
    rows.append(doc.Row([*measured, reached, reached, "█" * round(wide * w.reached)]))
    columns = [
        doc.Column("", right=False),
        doc.Column(unit),
        doc.Column("of the ideal", term="of the ideal"),
        doc.Column("of a step's time", term="step share", where=doc.PAGE),
        doc.Column("", right=False, where=doc.TERMINAL),
    ]
    return doc.Table(columns, rows)


def indicator_name(name: str) -> doc.Part:
    """Return the name of what an experiment or the record measures."""
    return doc.Part(INDICATORS[name].title, term=f"held by {name}")


def waterfall_chart(name: str, w: Waterfall, unit: str) -> doc.Chart:
    """Return the chart of a waterfall."""
    caption = (
        "Percentages are shares of the ideal throughput, not of a step's time. Lines are 90 % "
        f"intervals over {counted(w.repetitions, 'round')}."
    )
    if any(bar.loss.low <= 0 <= bar.loss.high for bar in w.bars):
        caption += " Hatched bars are within the spread of the rounds, so they may be zero."
    bars = joined(f"{INDICATORS[bar.id].title} {percent(bar.share.mean)}" for bar in w.bars)
    label = (
        f"From the ideal, {amount(w.ideal.mean)} {unit}, to the measured "
        f"{amount(w.measured.mean)} {unit}. Lost of the ideal: {bars}."
    )
    return doc.Chart(name, caption, label)


def waterfall_data(w: Waterfall, unit: str) -> dict[str, Any]:
    """Return the data of the waterfall chart, with one entry per bar from top to bottom.

    Lists: ``bases`` (start of each bar), ``lengths`` (negative for a loss), ``errors`` (half of the
    interval), ``colours``, and ``sure`` (whether the interval excludes zero). Values are in
    ``unit``.
    """
    bars = [_bar("ideal", w.ideal, 0.0, 1.0, unit) | {"colours": "soft"}]
    level = w.ideal.mean
    for bar in w.bars:
        drawn = _bar(
            INDICATORS[bar.id].title, bar.loss, level, bar.share.mean, unit, bar.of_step.mean
        )
        drawn |= {"colours": _COLOURS.get(bar.id, "other"), "lengths": -bar.loss.mean}
        bars.append(drawn | {"sure": not bar.loss.low <= 0 <= bar.loss.high})
        level -= bar.loss.mean
    bars.append(_bar("measured", w.measured, 0.0, w.reached, unit))
    highest = max(drawn["bases"] + max(drawn["lengths"], 0) for drawn in bars)
    intervals = [drawn["bases"] + drawn["lengths"] + drawn["errors"] for drawn in bars]
    top = 1.02 * min(max(highest, *intervals), _MAX_INTERVAL_LENGTH * highest)
    return {"unit": unit, "top": top} | {key: [drawn[key] for drawn in bars] for key in bars[0]}


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
