"""Diagnosis as terminal text and as JSON: waterfall, experiment and record compared, causes."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...analyze.diagnosis.causes import (
    CONFIRMED,
    MIN_SHARE,
    USUAL_SHARE,
    Cause,
    Witness,
    uncertain_bars,
)
from ...analyze.diagnosis.confirmation import EXCHANGE_PARTS
from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.remedy import Remedy
from ...analyze.diagnosis.rungs import Interval, Waterfall
from ...analyze.diagnosis.table import INDICATORS
from ...analyze.figures.report import Report
from .. import remedies as cures
from ..numbers import amount, counted, elapsed, finite, percent
from ..sentences import core_wait_sentence
from ..survey import describe_survey
from ..verdict.of_diagnosis import verdict_of_diagnosis
from .diagnosis import operators
from .diagnosis.lines import lines_as_json, render_lines
from .draw import draw_table, verdict_table
from .run_report import panel
from .step_work import reaches

NAMES = {one.name: one.title for one in INDICATORS.values()}

MIN_SHOWN = 0.005  # of a step's time; smaller parts of it are not listed


def render(found: Diagnosis, width: int = 100) -> RenderableType:
    """Return the diagnosis as text for a terminal with ``width`` columns."""
    ladder = found.ladder
    head = (
        f"{' '.join(found.command)} on {counted(found.report.size, 'rank')}: "
        f"{counted(len(ladder.rungs['everything']), 'round')} of "
        f"{counted(ladder.steps, 'step')} each, "
        f"{elapsed(ladder.seconds)}"
    )
    verdict = verdict_table(verdict_of_diagnosis(found))
    parts: list[RenderableType] = [verdict, Text(), Text(head, style="bold"), Text()]
    if found.waterfall is not None:
        parts += [_bars(found.waterfall, width, rate_unit(found.report)), Text()]
        parts += [_both(found.waterfall, found.witnesses), Text()]
        parts += _causes(found)
        parts += _cures(found)
    else:  # the time was not enough for the experiments
        parts += [panel(found.report, width, full=True), Text()]
    if found.lines is not None:
        parts += [Text(), *render_lines(found.lines)]
    parts += operators.render(found.operators)
    if ladder.survey is not None:
        parts += [Text(), *(Text(f"{x}.") for x in describe_survey(ladder.survey, found.minutes))]
    waits = waits_for_cores(found) if found.waterfall is not None else []
    parts += [Text(f"{said}.") for said in (*computing(found), *waits)]
    parts += [Text(f"{note}.", style="yellow") for note in found.notes]
    return Group(*parts)


def render_trial(trial: Any) -> RenderableType:
    """Return one line for a trial that has just ended."""
    return Text(cures.describe_trial(trial))


def render_trials(found: Diagnosis, width: int = 100) -> RenderableType:
    """Return what follows a diagnosis that was printed before its trials."""
    notes = [Text(f"{note}.", style="yellow") for note in found.notes]
    verdict = verdict_table(verdict_of_diagnosis(found))
    return Group(*_cures(found), *notes, Text(), verdict)


def _cures(found: Diagnosis) -> list[RenderableType]:
    """Render the proposed remedies, or the measured ones and those that remain after them."""
    if found.tried is None:
        would = _proposed(found.remedies, found)
        return [Text(), *would] if would else []
    tried = cures.tried_table(found.tried)
    parts: list[RenderableType] = [Text()]
    parts.append(draw_table(tried) if tried is not None else Text(cures.NOTHING_TRIED))
    parts += [Text(line) for line in cures.loss_changes(found.tried)]
    after = found.after
    if after is None or after.waterfall is None or found.waterfall is None:
        remaining = [one for one in found.remedies if one.knob not in found.tried.decided]
        left = _proposed(remaining, found)
        return [*parts, Text(), *left] if left else parts
    rates = (found.waterfall.measured.mean, after.waterfall.measured.mean)
    gain = found.tried.confirmed
    said = (
        f"From {amount(rates[0])} to {amount(rates[1])} {rate_unit(found.report)}: "
        f"{rates[1] / rates[0]:.3g} times."
        if gain is None
        else cures.describe_confirmed(gain)
    )
    faster = rates[1] > rates[0] if gain is None else gain.low > 0
    parts += [Text(), Text(said, style="bold green" if faster else "bold")]
    parts.append(draw_table(cures.before_after_table(found.waterfall, after.waterfall, NAMES)))
    return [*parts, Text(), *_causes(after), *_proposed(after.remedies, found)]


def _proposed(remedies: Sequence[Remedy], found: Diagnosis) -> list[RenderableType]:
    """Render remedies with their predicted gains, and errors of earlier predictions."""
    if not remedies:
        return []
    table = draw_table(cures.proposed_table(list(enumerate(remedies)), "remedies"))
    errors = cures.prediction_errors(remedies, found.off)
    return [table, *(Text(line, style="bright_black") for line in errors)]


def computing(found: Diagnosis) -> list[str]:
    """Return sentences that compare the script's computation with the limits of its machine.

    The sentences have no full stops. The list is empty without a roofline.
    """
    line = found.roofline
    useful = line.points.get("its useful time") if line is not None else None
    if line is None or useful is None:
        return []
    said = [
        f"While the model computes, it reaches {reaches(useful)} on {line.host} ({line.device})"
    ]
    if line.assumed:
        said.append(
            f"paceline check has not measured {found.report.hosts[0]}: the roofline is that of "
            f"{line.host}"
        )
    return said


def waits_for_cores(found: Diagnosis) -> list[str]:
    """Return which threads wait for a core, and what one thread per rank saves, if measured.

    The sentence has no full stop. The list is empty if no thread waits to speak of.
    """
    said = core_wait_sentence(found.report)
    if not said:
        return []
    saved = next((one.ladder for one in found.witnesses if one.name == "threads"), None)
    if saved is not None:
        gain = f"{_spread(saved)} of a step" if saved.mean > 0 else "nothing"
        said += f". One thread per rank saves {gain}, as measured"
    return [said]


def rate_unit(report: Report) -> str:
    """Return the unit of the waterfall: steps stand in for samples that the script hides."""
    return "samples/s" if report.samples_per_s else "steps/s"


def _bars(w: Waterfall, width: int, unit: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(unit, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("of ideal", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    whole = w.ideal.mean
    wide = max(10, min(60, width - 60))
    table.add_row("ideal", *_rate(w.ideal), "100.0 %", "█" * wide)
    level = whole
    for bar in w.bars:
        high, level = level, level - bar.loss.mean
        start, end = (round(wide * min(max(one, 0) / whole, 1)) for one in sorted((high, level)))
        lost = bar.loss.mean > 0
        sure = bar.loss.low > 0 or bar.loss.high < 0
        table.add_row(
            Text(f"- {NAMES[bar.id]}", style="" if sure else "bright_black"),
            *_rate(bar.loss),
            percent(bar.share.mean),
            Text(" " * start + "░" * (end - start), style="red" if lost else "green"),
        )
    share = w.reached
    table.add_row("measured", *_rate(w.measured), percent(share), "█" * round(wide * share))
    return table


def _rate(interval: Interval) -> tuple[str, str]:
    """Return a rate, and its interval if that says more than that the rate is noise."""
    half = (interval.high - interval.low) / 2
    around = f"± {amount(half)}" if math.isfinite(half) else "± ?"
    noise = math.isfinite(half) and half >= abs(interval.mean)
    return amount(interval.mean), "within the noise" if noise else around


def _both(w: Waterfall, witnesses: list[Witness]) -> Table:
    """Return the shares of a step's time: those of the waterfall with their sum, then parts."""
    table = Table(box=None, pad_edge=False)
    for heading in ("of a step's time", "experiment", "record", ""):
        table.add_column(
            heading, justify="right" if heading in ("experiment", "record") else "left"
        )
    bars = [bar.id for bar in w.bars]
    whole = [
        one for one in witnesses if one.name in bars or (one.ladder and one.name in EXCHANGE_PARTS)
    ]
    for one in whole:
        table.add_row(*_witness_row(one))
    rest = 1 - w.reached - sum(one.ladder.mean for one in whole if one.ladder)
    if abs(rest) >= MIN_SHOWN:  # a rung did not switch off all that it should
        table.add_row("  other losses", percent(rest))
    table.add_row("  the rest, as one rank alone", percent(w.reached))
    table.add_row("  sum", percent(1.0))
    if parts := [one for one in witnesses if one not in whole and _shows(one)]:
        table.add_row("parts of these shares")
    for one in parts:
        table.add_row(*_witness_row(one))
    return table


def _shows(one: Witness) -> bool:
    return max(one.ladder.mean if one.ladder else 0.0, one.record or 0.0) >= MIN_SHOWN


def _witness_row(one: Witness) -> tuple[str, str, str, Text]:
    return (
        f"  {NAMES[one.name]}",
        _spread(one.ladder) if one.ladder is not None else "",
        percent(one.record) if one.record is not None else "",
        Text("they differ" if one.differ else "", style="yellow"),
    )


def _spread(interval: Interval) -> str:
    if not math.isfinite(interval.low):
        return percent(interval.mean)
    return f"{percent(interval.mean)} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _causes(found: Diagnosis) -> list[RenderableType]:
    assert found.waterfall is not None
    known = [*found.causes, *found.usual]
    doubtful = " and ".join(NAMES[name] for name in uncertain_bars(found.waterfall, known))
    if not found.causes:
        share = percent(found.waterfall.reached)
        other = "other " * bool(found.usual)
        said = f"Training runs at {share} of the ideal. No {other}cause takes "
        said += f"{100 * MIN_SHARE:.0f} % of a step's time."
        if doubtful:
            said = f"Training runs at {share} of the ideal. {_DOUBT.format(doubtful)}"
        return [Text(said, style="bold"), *_usual(found), *_unconfirmed(found)]
    lines: list[RenderableType] = [Text("Largest causes, of a step's time:", style="bold")]
    for number, cause in enumerate(found.causes, 1):
        text = Text(f"{number}. ").append(percent(cause.share), style="bold")
        text.append(f"  {cause.sentence}.")
        if cause.confirmed != CONFIRMED:
            text.append(f" {_basis(cause)}", style="yellow")
        lines.append(text)
    lines += [Text(_DOUBT.format(doubtful))] if doubtful else []
    return [*lines, *_usual(found), *_unconfirmed(found)]


def _usual(found: Diagnosis) -> list[RenderableType]:
    """Render the losses that any training on several ranks has."""
    if not found.usual:
        return []
    limit = f"{100 * USUAL_SHARE:.0f} %"
    lines: list[RenderableType] = [Text(f"Usual costs, below {limit} of a step:", style="bold")]
    return lines + [Text(f"- {percent(one.share)}  {one.sentence}.") for one in found.usual]


def _unconfirmed(found: Diagnosis) -> list[RenderableType]:
    """Render the expected causes that the experiments do not confirm."""
    if not found.unconfirmed:
        return []
    lines: list[RenderableType] = [Text("Expected, but not confirmed by experiment:", style="bold")]
    for cause in found.unconfirmed:
        spread = _spread(cause.measured) if cause.measured is not None else "nothing"
        said = f"- {cause.id}: {percent(cause.share)} expected, {spread} measured"
        lines.append(Text(f"{said} ({cause.sentence})"))
    return lines


def _basis(cause: Cause) -> str:
    """Return what the share of an unconfirmed cause is based on, as a sentence."""
    if cause.measured is not None:
        return "Measured in the record; the experiments agree, with too few rounds to confirm it."
    return _BASES.get(cause.basis, "")


_BASES = {  # of causes that no experiment can switch off
    "record": "Measured in the record; no experiment can switch it off.",
    "estimate": "Estimated; no experiment could test it.",
}


_DOUBT = (
    "Uncertain: {} may cost time, but the rounds are too few or differ too much. HINT: use a "
    "larger --minutes, or a machine without other load."
)


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON-compatible values: docs/reference/formats/json.md."""
    ladder = found.ladder
    return {
        "format": "paceline-diagnosis",
        "version": 1,
        "command": found.command,
        "verdict": asdict(verdict_of_diagnosis(found)),
        "ranks": found.report.size,
        "warm_up": ladder.warm,
        "steps": ladder.steps,
        "seconds": ladder.seconds,
        "ended": ladder.ended,
        "survey": finite(asdict(ladder.survey)) if ladder.survey else None,
        "rungs": {name: [asdict(one) for one in runs] for name, runs in ladder.rungs.items()},
        "savings": ladder.savings,
        "loader": ladder.loader,
        "facts": ladder.facts,
        "waterfall": finite(asdict(found.waterfall)) if found.waterfall else None,
        "witnesses": [finite(asdict(one)) | {"differ": one.differ} for one in found.witnesses],
        "causes": [finite(asdict(cause)) for cause in found.causes],
        "usual": [finite(asdict(cause)) for cause in found.usual],
        "unconfirmed": [finite(asdict(cause)) for cause in found.unconfirmed],
        "lines": lines_as_json(found.lines),
        "notes": found.notes,
        "roofline": finite(asdict(found.roofline)) if found.roofline else None,
        "operators": finite(operators.as_json(found.operators)),
        **finite(cures.as_json(found)),
        "after": as_json(found.after) if found.after else None,
        "report": asdict(found.report),
    }
